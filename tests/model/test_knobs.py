"""Keys of a schedule and their defaults."""

from tests.model.schedules import ONLINE, configs_of


def test_absent_keys_have_defaults() -> None:
    [config] = configs_of("")
    assert config.values() == {
        "loops": ("q", "kv"),
        "tile.q": 64,
        "tile.kv": 64,
        "tile.d": 64,
        "warps": 4,
        "warp_split": "q",
        "stages": 2,
        "split.kv": 1,
        "pack": "none",
        "softmax": ONLINE,
        "persistent": False,
        "order": "default",
    }


def test_backward_has_its_own_keys_and_defaults() -> None:
    [config] = configs_of("tile.q = 32", "backward", grads="grad q, v")
    assert config.value("loops") == ("kv", "q")
    assert config.value("tile.q") == 64
    assert config.value("accumulate.dq") == config.value("accumulate.dv") == "two_pass"
    assert "accumulate.dk" not in config.values()
    assert "softmax" not in config.values()
