"""Configs of a small attention under a schedule that a test writes."""

from attnc.model.configs import configs
from attnc.model.schedule import Choice, Config, Phase, Value
from attnc.model.variants import variants
from tests.model.resolving import plain, resolve_text

ONLINE = Choice(name="online", args={"rescale": "deferred"})


def configs_of(
    body: str, phase: Phase = "forward", *, extra: str = "", grads: str = ""
) -> tuple[Config, ...]:
    """The configs of the default variant under a schedule with this body."""
    text = plain(extra).removesuffix("}\n") + f"  {grads}\n}}\nschedule plain for triton {{\n{body}\n}}\n"
    program = resolve_text(text)
    return configs(program.schedules[0], phase, variants(program, program.attentions[0])[0])


def values(body: str, key: str, phase: Phase = "forward") -> list[Value]:
    return [config.value(key) for config in configs_of(body, phase)]
