// Starts `attnc lsp` when a .attn file is opened, and stops it with the window.

const { workspace } = require("vscode");
const { LanguageClient, TransportKind } = require("vscode-languageclient/node");

let client;

exports.activate = function () {
  const command = workspace.getConfiguration("attn").get("command");
  const server = { command, args: ["lsp"], transport: TransportKind.stdio };
  client = new LanguageClient("attnc", "attnc", server, { documentSelector: [{ language: "attn" }] });
  return client.start();
};

exports.deactivate = function () {
  return client?.stop();
};
