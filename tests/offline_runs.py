"""Offline runs of W&B, read back from wandb's own file."""

from __future__ import annotations

BLOCK, HEADER = 32768, 7


def records(file):
    """The protobuf records of an offline run: LevelDB's log format behind wandb's seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), HEADER, b""
    assert data.startswith(b":W&B")
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def at_home(patch, home):
    """Let wandb keep to this folder, without a key and with no host to be reached: an attempt to use the network fails."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        patch.setenv(name, str(home))
    patch.delenv("WANDB_API_KEY", raising=False)
    patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
