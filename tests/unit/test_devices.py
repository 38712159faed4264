"""Device lists as users write them: every form, every mistake."""

import itertools

import pytest

from verl_ext_sharding.errors import PlacementError
from verl_ext_sharding.placement.devices import Topology, addresses, format_devices, parse_devices, split_optional

KEY = "sharding.roles.critic.devices"
ONE_NODE = Topology(num_nodes=1, devices_per_node=4)
TWO_NODES = Topology(num_nodes=2, devices_per_node=4)


def refusal(spec, topology=ONE_NODE):
    with pytest.raises(PlacementError) as caught:
        parse_devices(spec, topology, key=KEY)
    return caught.value


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (2, (2,)),
        ([2, 3], (2, 3)),
        ((0, 2), (0, 2)),
        ([3, 1], (3, 1)),
        ("2", (2,)),
        ("2-3", (2, 3)),
        ("2 - 3", (2, 3)),
        ("3-3", (3,)),
        ("0,2-3", (0, 2, 3)),
        (" 0 , 2 ", (0, 2)),
        ("cuda:2", (2,)),
        ("CUDA:2", (2,)),
        ("gpu:1", (1,)),
        ("npu : 1", (1,)),
        ("cuda:2-3", (2, 3)),
        ("cuda:0,gpu:2-3", (0, 2, 3)),
        ("[2,3]", (2, 3)),
        (" [ 0, 2-3 ] ", (0, 2, 3)),
        ("[cuda:1]", (1,)),
        (["0-1", "3-3"], (0, 1, 3)),
        ("cuda:0,cuda:3", (0, 3)),
        (["cuda:0", "2-3"], (0, 2, 3)),
        (["0-1", 3], (0, 1, 3)),
        ([[0], [1, 2]], (0, 1, 2)),
        ("all", (0, 1, 2, 3)),
        ("first_half", (0, 1)),
        ("second_half", (2, 3)),
        (["first_half", 3], (0, 1, 3)),
    ],
    ids=str,
)
def test_every_form_of_a_device_list_is_read(spec, numbers):
    assert parse_devices(spec, ONE_NODE, key=KEY) == numbers


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ([0, 7], (0, 7)),
        ("3-4", (3, 4)),
        ("cuda:5", (5,)),
        ("first_half", (0, 1, 2, 3)),
        ("second_half", (4, 5, 6, 7)),
        ({"node0": [0, 1], "node1": [0]}, (0, 1, 4)),
        ({"node1": "0-1"}, (4, 5)),
        ({"node1": 3}, (7,)),
        ({"node0": "cuda:3", "node1": "second_half"}, (3, 6, 7)),
        ({"node1": [1], "node0": [2]}, (5, 2)),
    ],
    ids=str,
)
def test_numbers_count_over_the_job_and_a_map_uses_the_numbers_of_each_node(spec, numbers):
    assert parse_devices(spec, TWO_NODES, key=KEY) == numbers


def test_numbers_keep_the_order_in_which_they_are_written():
    assert parse_devices([3, "0-1"], ONE_NODE, key=KEY) == (3, 0, 1)


def test_two_devices_have_halves_of_one():
    topology = Topology(num_nodes=1, devices_per_node=2)
    assert parse_devices("first_half", topology, key=KEY) == (0,)
    assert parse_devices("second_half", topology, key=KEY) == (1,)


def test_halves_of_an_odd_number_of_devices_cover_all_of_them_once():
    topology = Topology(num_nodes=1, devices_per_node=5)
    halves = [parse_devices(word, topology, key=KEY) for word in ("first_half", "second_half")]
    assert halves == [(0, 1), (2, 3, 4)]


def test_a_map_may_use_addresses_where_they_are_known():
    topology = Topology(num_nodes=2, devices_per_node=4, node_names=("10.0.0.1", "10.0.0.2"))
    assert parse_devices({"10.0.0.2": [0]}, topology, key=KEY) == (4,)


@pytest.mark.parametrize("count", [1, 4, 5, 8])
def test_what_is_printed_reads_back_as_the_same_devices(count):
    topology = Topology(num_nodes=1, devices_per_node=count)
    for length in range(1, count + 1):
        for devices in itertools.combinations(range(count), length):
            text = format_devices(devices)
            spec = text.strip('"') if text.startswith('"') else [int(n) for n in text.strip("[]").split(",")]
            assert parse_devices(spec, topology, key=KEY) == devices


def test_runs_of_more_than_four_devices_are_printed_as_a_range():
    assert format_devices(range(5)) == '"0-4"'
    assert format_devices(range(4)) == "[0,1,2,3]"
    assert format_devices((0, 1, 2, 3, 5)) == "[0,1,2,3,5]"


# Mistakes


@pytest.mark.parametrize("spec", [[4], [0, 9], "2-9", "cuda:4", "0,7", -1, [-1], ["0-4"]], ids=str)
def test_a_device_that_is_not_there_is_refused_with_the_devices_that_are(spec):
    error = refusal(spec)
    assert error.subject == KEY
    assert "devices 0 to 3" in error.expected
    assert "trainer.nnodes=1 x trainer.n_gpus_per_node=4" in error.expected
    assert str(spec) in error.found
    assert error.remedy.startswith(f"{KEY}=")


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ([0, 9], f"{KEY}=[0], or trainer.n_gpus_per_node=10"),
        ("2-9", f"{KEY}=[2,3], or trainer.n_gpus_per_node=10"),
        ("cuda:4", f"{KEY}=all, or trainer.n_gpus_per_node=5"),
        ([1, -1], f"{KEY}=[1]"),
    ],
    ids=str,
)
def test_what_to_write_instead_has_the_devices_that_are_there_or_a_job_that_has_them_all(spec, remedy):
    assert refusal(spec).remedy.removesuffix(" where the nodes have as many") == remedy


def test_unknown_devices_are_named():
    assert "device 4, 9" in refusal([9, 0, 4]).found


def test_a_range_far_beyond_the_devices_is_refused_in_a_short_message():
    error = refusal("0-999999999999")
    assert "0-999999999999" in error.found
    assert len(str(error)) < 600


def test_a_range_that_starts_beyond_the_devices_is_refused_as_unknown():
    assert "device 100" in refusal("100-200").found


@pytest.mark.parametrize(
    ("spec", "repeated", "remedy"),
    [
        ([1, 1], "device 1", f"{KEY}=[1]"),
        ("0-2,1", "device 1", f"{KEY}=[0,1,2]"),
        (["cuda:0", 0, 3, "3"], "device 0, 3", f"{KEY}=[0,3]"),
        (["all", 0], "device 0", f"{KEY}=[0,1,2,3]"),
        ({"node0": [0, 0]}, "device 0", f"{KEY}=[0]"),
    ],
    ids=str,
)
def test_a_device_named_twice_is_refused_with_the_list_without_it(spec, repeated, remedy):
    error = refusal(spec)
    assert error.subject == KEY
    assert repeated in error.found
    assert error.remedy == remedy


@pytest.mark.parametrize("spec", [[], {}, {"node0": []}, [[]], "[]", "[ ]"], ids=str)
def test_an_empty_list_is_refused_with_null_as_the_way_out(spec):
    error = refusal(spec)
    assert error.found == "an empty list"
    assert f"{KEY}=null" in error.remedy


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "x",
        "cuda",
        "cuda:",
        "2-",
        "-1",
        "1-2-3",
        "1;2",
        "0..3",
        "[1",
        "1]",
        1.0,
        [1.5],
        True,
        [True],
        [None],
        object(),
    ],
    ids=lambda spec: type(spec).__name__ if type(spec) is object else str(spec),
)
def test_what_is_no_device_list_is_refused_with_the_forms_that_are(spec):
    error = refusal(spec)
    assert error.subject == KEY
    for form in ("[2,3]", "2-3", "cuda:2", "first_half", "{node0: [0]}"):
        assert form in error.expected


def test_a_range_that_descends_is_refused_with_the_range_turned_around():
    assert refusal("3-1").remedy == f'{KEY}="1-3"'


def test_addresses_that_maps_name_are_in_verls_order_which_is_that_of_text():
    specs = [
        {"10.0.0.9": [0], "node1": [1]},
        [0, 1],
        "2-3",
        {"10.0.0.10": [0], "10.0.0.9": [1]},
        None,
        {"fe80::1": [0]},
    ]
    assert addresses(specs) == ("10.0.0.10", "10.0.0.9", "fe80::1")


@pytest.mark.parametrize("name", ["node0", "nod0", "0", "10.0.0", "host-a", ""])
def test_other_names_are_no_addresses(name):
    assert addresses([{name: [0]}]) == ()


@pytest.mark.parametrize("name", ["node2", "nod0", "node", "0", "10.0.0.9", "NODE0"])
def test_a_node_that_is_not_there_is_refused_with_the_nodes_that_are(name):
    error = refusal({name: [0]}, TWO_NODES)
    assert error.subject == KEY
    assert "node0, node1" in error.expected
    assert error.found == name
    more = ", or trainer.nnodes=3 where there are as many nodes" if name == "node2" else ""
    assert error.remedy == f"'{KEY}={{node0:[0]}}'{more}"


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ({"node0": [0], "host-a": "2-3"}, f"""'{KEY}={{node0:[0],node1:"2-3"}}'"""),
        ({"nod1": ["cuda:2", 3]}, f"""'{KEY}={{node1:["cuda:2",3]}}'"""),
        ({"node0": [0], "node1": [0], "node7": [0]}, "trainer.nnodes=8 where there are as many nodes"),
        ({"node0": [0], "node1": [0], "host-a": [0]}, "trainer.nnodes=3 where there are as many nodes"),
    ],
    ids=str,
)
def test_a_node_that_is_not_there_is_answered_with_the_whole_map_to_type(spec, remedy):
    assert refusal(spec, TWO_NODES).remedy == remedy


def test_a_map_as_text_is_answered_with_the_map():
    text = "{node0:[0,1],node1:[0]}"
    assert refusal(text, TWO_NODES).remedy == f"'{KEY}={text}'"


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("ALL", "all"),
        ("0 1", "[0,1]"),
        ("1,", "[1]"),
        (["gpu3"], "[3]"),
        ('"2-3"', "[2,3]"),
        ([2.0], "[2]"),
        ("policy", "null"),
        ("cpu", "null"),
        ("half", "null"),
        ("two", "null"),
        ("second_haf", "second_half"),
        ("second half", "second_half"),
        ("2nd_half", "second_half"),
        ("last_half", "second_half"),
        ("last", "second_half"),
        ("second", "second_half"),
        ("first", "first_half"),
        (["first_halv", 3], "first_half"),
        ("", "null"),
        ("None", "null"),
        ("auto", "null"),
        ("node1: 0-3", '{node1:"0-3"}'),
    ],
    ids=str,
)
def test_what_can_not_be_read_is_answered_with_what_it_seems_to_mean(spec, meant):
    assert refusal(spec).remedy == f"{KEY}={meant}"


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("second_haf", "'{}={{node0:[0],node1:second_half}}'"),
        ("3-1", """'{}={{node0:[0],node1:"1-3"}}'"""),
        ("1;2", "'{}={{node0:[0],node1:[1,2]}}'"),
        ("cpu", "{}=null"),
    ],
)
def test_what_can_not_be_read_in_a_map_is_answered_with_the_whole_map(spec, meant):
    assert refusal({"node0": [0], "node1": spec}, TWO_NODES).remedy == meant.format(KEY)


@pytest.mark.parametrize("spec", [[4], "2-5", [-1]], ids=str)
def test_a_map_with_a_number_of_another_node_is_refused_with_the_numbers_of_this_one(spec):
    error = refusal({"node1": spec}, TWO_NODES)
    assert error.subject == f"{KEY}.node1"
    assert "0 to 3" in error.expected
    meant = {
        "[4]": "'{}={{node1:[all]}}', or trainer.n_gpus_per_node=5",
        "2-5": "'{}={{node1:[2,3]}}', or trainer.n_gpus_per_node=6",
    }
    expected = meant.get(str(spec), "'{}={{node1:[all]}}'").format(KEY)
    assert error.remedy.removesuffix(" where the nodes have as many") == expected


def test_a_device_reached_by_number_and_by_address_counts_as_named_twice():
    topology = Topology(num_nodes=1, devices_per_node=2, node_names=("10.0.0.1",))
    assert "device 1 more than once" in refusal({"node0": [1], "10.0.0.1": [1]}, topology).found


def test_an_address_that_two_nodes_share_is_no_node():
    topology = Topology(num_nodes=2, devices_per_node=2, node_names=("127.0.0.1", "127.0.0.1"))
    assert refusal({"127.0.0.1": [0]}, topology).found == "127.0.0.1"


@pytest.mark.parametrize("word", ["first_half", "second_half"])
def test_one_device_has_no_halves(word):
    error = refusal(word, Topology(num_nodes=1, devices_per_node=1))
    assert error.expected == "two devices or more to halve"
    assert error.remedy == f"{KEY}=all"


@pytest.mark.parametrize(
    ("nodes", "devices", "key"),
    [(0, 4, "trainer.nnodes"), (1, 0, "trainer.n_gpus_per_node"), (1, -1, "trainer.n_gpus_per_node")],
)
def test_a_job_without_devices_is_refused(nodes, devices, key):
    with pytest.raises(PlacementError) as caught:
        Topology(num_nodes=nodes, devices_per_node=devices)
    assert caught.value.subject == key
    assert caught.value.remedy == f"{key}=1"


# Optional lists


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("second_half?", ("second_half", True)),
        ("2-3? ", ("2-3", True)),
        ("second_half", ("second_half", False)),
        ([2, 3], ([2, 3], False)),
        (None, (None, False)),
    ],
    ids=str,
)
def test_a_question_mark_makes_a_list_optional(spec, expected):
    assert split_optional(spec) == expected
