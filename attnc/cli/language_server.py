"""The language server: `attnc.editor` in the words of the protocol.

Columns of the protocol count units of the encoding that editor and server agreed on (UTF-16, mostly), lines
and columns from 0; the compiler counts characters.
"""

from __future__ import annotations

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer
from pygls.workspace import PositionCodec

import attnc
from attnc import editor
from attnc.diagnostics import Diagnostic, Label
from attnc.source import Source, Span

_SEVERITIES = {
    "error": lsp.DiagnosticSeverity.Error,
    "warning": lsp.DiagnosticSeverity.Warning,
    "note": lsp.DiagnosticSeverity.Information,
}
_KINDS = {
    "keyword": lsp.CompletionItemKind.Keyword,
    "function": lsp.CompletionItemKind.Function,
    "variable": lsp.CompletionItemKind.Variable,
    "type": lsp.CompletionItemKind.TypeParameter,
    "property": lsp.CompletionItemKind.Property,
    "value": lsp.CompletionItemKind.EnumMember,
}


def server() -> LanguageServer:
    """Returns a server that has not been started."""
    made = LanguageServer(
        "attnc", f"v{attnc.__version__}", text_document_sync_kind=lsp.TextDocumentSyncKind.Full
    )

    def document(uri: str) -> _Document:
        text = made.workspace.get_text_document(uri)
        return _Document(uri, text.path or uri, text.source, text.position_codec)

    def publish(uri: str) -> None:
        opened = document(uri)
        made.text_document_publish_diagnostics(
            lsp.PublishDiagnosticsParams(
                uri=uri, diagnostics=[opened.message(found) for found in editor.diagnose(opened.source)]
            )
        )

    def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        publish(params.text_document.uri)

    def change_text(params: lsp.DidChangeTextDocumentParams) -> None:
        publish(params.text_document.uri)

    def close_text(params: lsp.DidCloseTextDocumentParams) -> None:
        nothing = lsp.PublishDiagnosticsParams(uri=params.text_document.uri, diagnostics=[])
        made.text_document_publish_diagnostics(nothing)

    def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        read = document(params.text_document.uri)
        found = editor.hover(read.source, read.offset(params.position))
        if found is None:
            return None
        text = lsp.MarkupContent(kind=lsp.MarkupKind.Markdown, value=found.text)
        return lsp.Hover(contents=text, range=read.range(found.span))

    def complete(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        read = document(params.text_document.uri)
        return [
            lsp.CompletionItem(
                label=found.word,
                kind=_KINDS[found.kind],
                detail=found.detail or None,
                sort_text=f"{i:04}",
            )
            for i, found in enumerate(editor.complete(read.source, read.offset(params.position)))
        ]

    def format_text(params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit] | None:
        read = document(params.text_document.uri)
        text = editor.format_text(read.source)
        if text is None or text == read.source.text:
            return None
        return [lsp.TextEdit(range=read.range(read.source.span(0, len(read.source.text))), new_text=text)]

    made.feature(lsp.TEXT_DOCUMENT_DID_OPEN)(opened)
    made.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)(change_text)
    made.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)(close_text)
    made.feature(lsp.TEXT_DOCUMENT_HOVER)(hover)
    made.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=["."]))(complete)
    made.feature(lsp.TEXT_DOCUMENT_FORMATTING)(format_text)
    return made


class _Document:
    def __init__(self, uri: str, path: str, text: str, codec: PositionCodec) -> None:
        self.uri = uri
        self.source = Source(path, text)
        self._codec = codec

    def offset(self, position: lsp.Position) -> int:
        """Returns the character at a position; the end of the line where it has fewer."""
        last = self.source.position(len(self.source.text))[0]
        line = min(position.line + 1, last)
        text = self.source.line_text(line)
        units = column = 0
        while column < len(text) and units < position.character:
            units += self._codec.client_num_units(text[column])
            column += 1
        return self.source.line_start(line) + column

    def position(self, offset: int) -> lsp.Position:
        line, column = self.source.position(offset)
        start = self.source.line_start(line)
        before = self.source.text[start : start + column - 1]
        return lsp.Position(line=line - 1, character=self._codec.client_num_units(before))

    def range(self, span: Span) -> lsp.Range:
        return lsp.Range(start=self.position(span.start), end=self.position(span.end))

    def message(self, found: Diagnostic) -> lsp.Diagnostic:
        parts = [found.message, *([found.primary.text] if found.primary.text else [])]
        parts += [f"note: {text}" for text in found.notes] + [f"help: {text}" for text in found.hints]
        return lsp.Diagnostic(
            range=self.range(self._in_this_text(found.primary).span),
            message="\n".join(parts),
            severity=_SEVERITIES[found.severity],
            code=found.code,
            source="attnc",
            related_information=[
                lsp.DiagnosticRelatedInformation(
                    location=lsp.Location(uri=self.uri, range=self.range(label.span)), message=label.text
                )
                for label in found.related
                if label.span.source is self.source
            ],
        )

    def _in_this_text(self, label: Label) -> Label:
        return label if label.span.source is self.source else Label(self.source.span(0, 0), label.text)
