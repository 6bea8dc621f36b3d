"""The Chakra wire format, against an independent protobuf implementation and against bad bytes."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulate.astra import Files, emit, read_trace
from simulate.astra.chakra import (
    COLL,
    COMP,
    RECV,
    SEND,
    Broken,
    Node,
    decode,
    encode_header,
    encode_node,
)
from spec.errors import UserError
from tests.programs import pipeline

NODES = [
    Node(1, "forward", COMP, num_ops=300_000_500, tensor_size=1),
    Node(2, "äöü", COLL, ctrl_deps=(1,), data_deps=(1,), comm_type=0, comm_size=1 << 40,
         dims=(True, False, True)),
    Node(300, "send", SEND, data_deps=(1, 2), comm_size=5, tag=129, peer=8191),
    Node(301, "recv", RECV, comm_size=5, tag=0, peer=0),
    Node(302, "scatter", COLL, comm_type=7, comm_size=4096),
]  # fmt: skip


def stream(nodes: list[Node]) -> bytes:
    return encode_header() + b"".join(map(encode_node, nodes))


def test_nodes_come_back() -> None:
    assert [node for node, _ in decode(stream(NODES))] == NODES


def test_peers_lie_where_the_reader_says() -> None:
    data = stream(NODES)
    for node, offset in decode(data):
        if node.type in (SEND, RECV):
            assert int.from_bytes(data[offset : offset + 4], "little") == node.peer
        else:
            assert offset == -1


@given(st.integers(0, len(stream(NODES)) - 1))
def test_a_truncated_file_is_said(length: int) -> None:
    """Cut anywhere, the file is refused or ends after a whole node."""
    try:
        found = decode(stream(NODES)[:length])
    except Broken:
        return
    assert [node for node, _ in found] == NODES[: len(found)]


@given(st.integers(0, len(stream(NODES)) - 1), st.integers(0, 255), st.binary(max_size=20))
def test_hostile_bytes_raise_nothing_else(at: int, byte: int, more: bytes) -> None:
    data = bytearray(stream(NODES))
    data[at] = byte
    data[at:at] = more
    with suppress(Broken):
        decode(bytes(data))


@given(st.binary(max_size=200))
def test_noise_raises_nothing_else(data: bytes) -> None:
    with suppress(Broken):
        decode(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends inside an integer"),
        (b"\xff" * 11, "longer than 10 bytes"),
        (b"\x05abc", "ends inside the metadata"),
        (encode_header() + b"\x7f\x08", "ends inside the node"),
        (encode_header() + b"\x02\x18\x01", "has type 1"),
        (
            encode_header() + b"\x12\x08\x07\x18\x07R\x0c\n\x07pg_name\xea\x01\x00",
            "node 7 names a group",
        ),
    ],
)
def test_what_is_wrong_with_a_file(data: bytes, words: str, tmp_path: Path) -> None:
    directory = tmp_path / "emitted"
    emit(pipeline({"pp": 2}, 2), directory, whole=True)
    path = Files(directory).trace(1)
    path.write_bytes(data)
    with pytest.raises(UserError, match=words) as error:
        read_trace(directory)
    assert "step.1.et" in str(error.value)


def test_graphs_that_are_none(tmp_path: Path) -> None:
    def wrong(nodes: list[Node], words: str) -> None:
        directory = tmp_path / "emitted"
        emit(pipeline({"pp": 2}, 2), directory, whole=True)
        Files(directory).trace(0).write_bytes(stream(nodes))
        with pytest.raises(UserError, match=words):
            read_trace(directory)

    one = NODES[0]
    wrong([one, one], "same id")
    wrong([], "no nodes")
    wrong([Node(1, "a", COMP, data_deps=(9,), num_ops=1, tensor_size=1)], "which is absent")
    wrong(
        [
            Node(1, "a", COMP, data_deps=(2,), num_ops=1, tensor_size=1),
            Node(2, "b", COMP, ctrl_deps=(1,), num_ops=1, tensor_size=1),
        ],
        "for itself",
    )
    wrong([Node(1, "s", SEND, comm_size=1, peer=77)], "is no rank")


def _schema() -> Any:
    """Node and GlobalMetadata for Google's protobuf, from the public schema's numbers and types."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    kinds = {"uint64": 4, "string": 9, "message": 11, "bool": 8, "fixed32": 7, "int32": 5}
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="p", syntax="proto3")

    def message(name: str, fields: list[tuple[str, int, str, bool, str]]) -> None:
        proto = file.message_type.add(name=name)
        for field, number, kind, repeated, type_name in fields:
            proto.field.add(
                name=field,
                number=number,
                type=kinds[kind],
                label=3 if repeated else 1,
                type_name=type_name or None,
            )

    message("BoolList", [("values", 1, "bool", True, "")])
    message(
        "Attribute",
        [
            ("name", 1, "string", False, ""),
            ("uint64_val", 13, "uint64", False, ""),
            ("fixed32_val", 19, "fixed32", False, ""),
            ("bool_list", 28, "message", False, ".p.BoolList"),
        ],
    )
    message("Metadata", [("version", 1, "string", False, "")])
    message(
        "Node",
        [
            ("id", 1, "uint64", False, ""),
            ("name", 2, "string", False, ""),
            ("type", 3, "int32", False, ""),
            ("ctrl_deps", 4, "uint64", True, ""),
            ("data_deps", 5, "uint64", True, ""),
            ("attr", 10, "message", True, ".p.Attribute"),
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    get = message_factory.GetMessageClass
    return get(pool.FindMessageTypeByName("p.Metadata")), get(pool.FindMessageTypeByName("p.Node"))


def _delimited(data: bytes) -> list[bytes]:
    """The messages of a length-delimited stream, taken apart with protobuf's own varints."""
    from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

    at, parts = 0, []
    while at < len(data):
        size, at = _DecodeVarint32(data, at)
        parts.append(data[at : at + size])
        at += size
    return parts


def _compare(data: bytes, metadata: Any, node: Any) -> None:
    first, *rest = _delimited(data)
    assert metadata.FromString(first).version
    ours = [one for one, _ in decode(data)]
    assert len(ours) == len(rest)
    for one, part in zip(ours, rest, strict=True):
        theirs = node.FromString(part)
        assert (theirs.id, theirs.name, theirs.type) == (one.id, one.name, one.type)
        assert tuple(theirs.ctrl_deps) == one.ctrl_deps
        assert tuple(theirs.data_deps) == one.data_deps
        values = {attribute.name: attribute for attribute in theirs.attr}
        if one.type in (SEND, RECV):
            peer = values["comm_dst" if one.type == SEND else "comm_src"]
            assert peer.fixed32_val == one.peer
            assert values["comm_tag"].uint64_val == one.tag
        if one.type != COMP:
            assert values["comm_size"].uint64_val == one.comm_size
        if one.comm_type is not None:
            assert values["comm_type"].uint64_val == one.comm_type
        if one.dims is not None:
            assert tuple(values["involved_dim"].bool_list.values) == one.dims
        if one.num_ops is not None:
            assert values["num_ops"].uint64_val == one.num_ops


def _emitted(directory: Path) -> list[bytes]:
    emit(
        pipeline({"tp": 2, "dp": 2, "pp": 2}, 4, tp=(1 << 20, 4e4), dp=(1 << 28, 4e6), norm_ns=6e4),
        directory,
        whole=True,
    )
    return [Files(directory).trace(rank).read_bytes() for rank in range(8)]


def test_googles_protobuf_reads_what_we_write(tmp_path: Path) -> None:
    metadata, node = _schema()
    for data in [stream(NODES), *_emitted(tmp_path / "emitted")]:
        _compare(data, metadata, node)


@pytest.mark.skipif(
    not os.environ.get("CHAKRA_SCHEMA"), reason="CHAKRA_SCHEMA names no et_def.proto"
)
def test_a_reader_generated_from_the_public_schema_reads_what_we_write(tmp_path: Path) -> None:
    """CHAKRA_SCHEMA=<et_def.proto of mlcommons/chakra>; needs grpcio-tools."""
    pytest.importorskip("grpc_tools")
    schema = Path(os.environ["CHAKRA_SCHEMA"])
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{schema.parent}",
         f"--python_out={tmp_path}", schema.name],
        check=True,
    )  # fmt: skip
    sys.path.insert(0, str(tmp_path))
    try:
        module = __import__(f"{schema.stem}_pb2")
    finally:
        sys.path.remove(str(tmp_path))
    for data in [stream(NODES), *_emitted(tmp_path / "emitted")]:
        _compare(data, module.GlobalMetadata, module.Node)
