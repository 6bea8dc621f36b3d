"""Chakra execution traces: one node as bytes and back.

A trace file is length-delimited protobuf: varint length and GlobalMetadata, then varint length and
Node, repeated. Field numbers are those of the public schema, `et_def.proto` of
https://github.com/mlcommons/chakra (package ChakraProtoMsg).

We encode by hand: an 8,192-rank workload is two million nodes. Every peer is written as a
fixed32 in the node's last four bytes, so that one encoded stage serves all its ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from spec.errors import UserError

# NodeType
COMP, SEND, RECV, COLL = 4, 5, 6, 7
TYPE_NAMES = {COMP: "compute", SEND: "send", RECV: "recv", COLL: "collective"}
# CollectiveCommType
COMM_TYPES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
COMM_NAMES = {number: name for name, number in COMM_TYPES.items()}

# the version that Chakra's own converters write; Astra-Sim ignores it
_METADATA = b"\x0a\x050.0.4"

# Node fields
_ID, _NAME, _TYPE, _CTRL_DEPS, _DATA_DEPS, _ATTR = 1, 2, 3, 4, 5, 10
# AttributeProto fields that hold one integer: int32, int64, uint32, uint64, bool
_VARINT_VALUES = {7, 9, 11, 13, 27}
_ZIGZAG_VALUES = {15, 17}  # sint32, sint64
_UINT64_VALUE, _FIXED32_VALUE, _BOOL_LIST = 13, 19, 28


@dataclass(frozen=True, slots=True)
class Node:
    """One node, as far as Astra-Sim reads it. Sizes in bytes."""

    id: int
    name: str
    type: int  # COMP, SEND, RECV or COLL
    ctrl_deps: tuple[int, ...] = ()
    data_deps: tuple[int, ...] = ()
    num_ops: int | None = None
    tensor_size: int | None = None
    comm_type: int | None = None
    comm_size: int = 0
    tag: int = 0
    peer: int = -1  # rank: destination of a send, source of a recv
    dims: tuple[bool, ...] | None = None  # involved dimensions; None means four times true

    def without_peer(self) -> "Node":
        """The node with no peer: what ranks of one stage have in common."""
        return replace(self, peer=-1) if self.peer >= 0 else self


def varint(value: int) -> bytes:
    """Protobuf's variable-length form of a non-negative integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _length_field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def _varint_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def _attribute(name: str, value: bytes) -> bytes:
    return _length_field(_ATTR, _length_field(1, name.encode()) + value)


@lru_cache(maxsize=4096)
def _integer(name: str, value: int) -> bytes:
    return _attribute(name, _varint_field(_UINT64_VALUE, value))


def _ids(number: int, ids: tuple[int, ...]) -> bytes:
    return _length_field(number, b"".join(map(varint, ids))) if ids else b""


def encode_node(node: Node) -> bytes:
    """The length-delimited bytes of `node`; those of a send or recv end in its peer (4 bytes)."""
    parts = [
        _varint_field(_ID, node.id),
        _length_field(_NAME, node.name.encode()),
        _varint_field(_TYPE, node.type),
        _ids(_CTRL_DEPS, node.ctrl_deps),
        _ids(_DATA_DEPS, node.data_deps),
    ]
    if node.num_ops is not None:
        parts.append(_integer("num_ops", node.num_ops))
    if node.tensor_size is not None:
        parts.append(_integer("tensor_size", node.tensor_size))
    if node.type != COMP:
        parts.append(_integer("comm_size", node.comm_size))
    if node.comm_type is not None:
        parts.append(_integer("comm_type", node.comm_type))
    if node.dims is not None:
        packed = _length_field(1, bytes(node.dims))
        parts.append(_attribute("involved_dim", _length_field(_BOOL_LIST, packed)))
    if node.type in (SEND, RECV):
        parts.append(_integer("comm_tag", node.tag))
        # the node's own side is left out: Astra-Sim takes it to be the rank that reads the file
        # no peer yet: 0, for the writer to fill in
        value = varint(_FIXED32_VALUE << 3 | 5) + max(node.peer, 0).to_bytes(4, "little")
        parts.append(_attribute("comm_dst" if node.type == SEND else "comm_src", value))
    body = b"".join(parts)
    return varint(len(body)) + body


def encode_header() -> bytes:
    """The bytes that every trace file starts with."""
    return varint(len(_METADATA)) + _METADATA


class Broken(Exception):
    """A trace file that is not one; the reader adds the file's name and raises UserError."""


def _read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise Broken(f"the integer before byte {at} has more than 64 bits")
            return value, at
        shift += 7
        if shift > 63:
            raise Broken(f"the integer before byte {at} is longer than 10 bytes")
    raise Broken(f"it ends inside an integer at byte {at}")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, value or start, end) of the message in data[at:end]."""
    while at < end:
        key, at = _read_varint(data, at, end)
        wire = key & 7
        if wire == 0:
            value, at = _read_varint(data, at, end)
            yield key >> 3, wire, value, at
        elif wire == 2:
            size, at = _read_varint(data, at, end)
            if size > end - at:
                raise Broken(f"the field at byte {at} claims {size} bytes of {end - at} left")
            yield key >> 3, wire, at, at + size
            at += size
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            if size > end - at:
                raise Broken(f"it ends inside a number at byte {at}")
            yield key >> 3, wire, at, at + size
            at += size
        else:
            raise Broken(f"byte {at} starts a field of unknown kind {wire}")


def _text(data: bytes, start: int, end: int) -> str:
    try:
        return data[start:end].decode()
    except UnicodeDecodeError:
        raise Broken(f"the text at byte {start} is not UTF-8") from None


def _read_ids(data: bytes, wire: int, value: int, end: int) -> tuple[int, ...]:
    if wire == 0:
        return (value,)
    ids = []
    while value < end:
        one, value = _read_varint(data, value, end)
        ids.append(one)
    return tuple(ids)


def _read_attribute(data: bytes, at: int, end: int) -> tuple[str, int | tuple[bool, ...], int]:
    """(name, value, offset of a fixed32 or -1); texts and lists but of booleans read as 0."""
    name, result, offset = "", 0, -1
    for number, wire, value, stop in _fields(data, at, end):
        if number == 1 and wire == 2:
            name = _text(data, value, stop)
        elif number in _VARINT_VALUES and wire == 0:
            result = value
        elif number in _ZIGZAG_VALUES and wire == 0:
            result = value >> 1 ^ -(value & 1)
        elif wire in (1, 5) and number not in (3, 5):
            result = int.from_bytes(data[value:stop], "little")
            offset = value if number == _FIXED32_VALUE else -1
        elif number == _BOOL_LIST and wire == 2:
            flags: tuple[int, ...] = ()
            for _, kind, start, last in _fields(data, value, stop):
                flags += _read_ids(data, kind, start, last)
            return name, tuple(map(bool, flags)), -1
    return name, result, offset


def _integer_of(name: str, value: int | tuple[bool, ...]) -> int:
    if isinstance(value, int) and 0 <= value < 1 << 63:
        return value
    raise Broken(f"attribute {name} is {value!r}, not a non-negative integer")


def _decode_node(data: bytes, at: int, end: int) -> tuple[Node, int]:
    """The node in data[at:end] and the offset of its peer (-1: not a fixed32)."""
    numbers = {_ID: 0, _TYPE: 0}
    name, peer_name = "", ""
    ctrl: tuple[int, ...] = ()
    deps: tuple[int, ...] = ()
    dims: tuple[bool, ...] | None = None
    attributes: dict[str, int] = {}
    offsets: dict[str, int] = {}
    grouped = False
    for number, wire, value, stop in _fields(data, at, end):
        if wire == 0 and number in numbers:
            numbers[number] = value
        elif number == _NAME and wire == 2:
            name = _text(data, value, stop)
        elif number == _CTRL_DEPS and wire in (0, 2):
            ctrl += _read_ids(data, wire, value, stop)
        elif number == _DATA_DEPS and wire in (0, 2):
            deps += _read_ids(data, wire, value, stop)
        elif number == _ATTR and wire == 2:
            key, attribute, offset = _read_attribute(data, value, stop)
            if key == "involved_dim" and isinstance(attribute, tuple):
                dims = attribute
            elif key == "pg_name":
                grouped = True
            elif key in _READ:
                attributes[key] = _integer_of(key, attribute)
                offsets[key] = offset
    kind = numbers[_TYPE]
    if kind not in TYPE_NAMES:
        raise Broken(f"node {numbers[_ID]} has type {kind}; known are 4, 5, 6 and 7")
    if grouped:
        raise Broken(f"node {numbers[_ID]} names a group of ranks, which our timing rules lack")
    if attributes.get("is_cpu_op"):
        raise Broken(f"node {numbers[_ID]} runs on the CPU, which breaks Astra-Sim's statistics")
    if kind in (SEND, RECV):
        peer_name = "comm_dst" if kind == SEND else "comm_src"
        missing = [a for a in (peer_name, "comm_size", "comm_tag") if a not in attributes]
    elif kind == COLL:
        missing = [a for a in ("comm_type", "comm_size") if a not in attributes]
    else:
        missing = []
    if missing:
        raise Broken(f"node {numbers[_ID]} lacks the attribute {missing[0]}")
    node = Node(
        id=numbers[_ID],
        name=name,
        type=kind,
        ctrl_deps=ctrl,
        data_deps=deps,
        num_ops=attributes.get("num_ops"),
        tensor_size=attributes.get("tensor_size"),
        comm_type=attributes.get("comm_type"),
        comm_size=attributes.get("comm_size", 0),
        tag=attributes.get("comm_tag", 0),
        peer=attributes.get(peer_name, -1),
        dims=dims,
    )
    return node, offsets.get(peer_name, -1)


_READ = {
    "is_cpu_op",
    "num_ops",
    "tensor_size",
    "comm_type",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
}


def decode(data: bytes) -> list[tuple[Node, int]]:
    """Every node of a trace file, with the offset of its peer where that is a fixed32, else -1.

    Raises Broken for bytes that are no trace.
    """
    size, at = _read_varint(data, 0, len(data))
    if size > len(data) - at:
        raise Broken("it ends inside the metadata")
    for _ in _fields(data, at, at + size):
        pass
    at += size
    nodes = []
    while at < len(data):
        size, at = _read_varint(data, at, len(data))
        if size > len(data) - at:
            raise Broken(f"it ends inside the node at byte {at}")
        nodes.append(_decode_node(data, at, at + size))
        at += size
    return nodes


def decode_named(data: bytes, name: str) -> list[tuple[Node, int]]:
    """`decode`, with a UserError that names the file."""
    try:
        return decode(data)
    except Broken as error:
        raise UserError(f"{name}: not a Chakra trace that Astra-Sim can run: {error}.") from None
