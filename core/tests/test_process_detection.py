import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain._builtin.clusters import CLUSTERS
from drivetrain._engine.detect import detect_process, survey_process
from drivetrain.errors import EnvironmentDetectionError
from drivetrain.specs import ClusterSpec, ProcessInfo

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}


def torchrun(rank, world, local_rank=None, local_world=None, node=None, **more):
    values = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": node,
        **more,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


# Recorded with `mpiexec -n 2 env` (Open MPI 5.0.11, MPICH 5.0, Intel MPI 2021.19), rank 1; MVAPICH from its documentation.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-9351@1",
    "PMIX_RANK": "1",
}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
INTEL_MPI = {
    "HYDRA_BSTRAP_LAUNCHER": "ssh",
    "I_MPI_HYDRA_UUID": "9c240000-2d3c-4d19-7a61-06006c13534c",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "PMI_PORT": "vm:41235",
}
MVAPICH = {name.replace("MV2_", "MVP_"): value for name, value in MVAPICH2.items()}
FLAVOURS = {
    "openmpi": OPEN_MPI,
    "mpich": MPICH,
    "intel-mpi": INTEL_MPI,
    "mvapich": MVAPICH2,
    "mvapich-3": MVAPICH,
}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_each_mpi_flavour_tells_rank_and_meeting_point_on_one_machine(flavour):
    survey = survey_process(CLUSTERS, FLAVOURS[flavour])
    process = survey.process
    assert process.cluster == flavour.removesuffix("-3")
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (1, 2, 1, 2)
    assert process.node_rank == 0
    assert process.rendezvous.startswith("tcp://127.0.0.1:")
    assert survey.rejected == ()


def test_ports_follow_from_the_job_and_are_the_same_in_all_its_processes():
    def port(**changes):
        return int(detect_process(CLUSTERS, {**OPEN_MPI, **changes}).rendezvous.rpartition(":")[2])

    assert port() == port(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    assert port() != port(PMIX_NAMESPACE="prterun-vm-9352@1")
    assert 20000 <= port() < 30000


def test_without_a_job_id_the_default_port_is_used_and_said():
    survey = survey_process(CLUSTERS, MPICH)
    assert survey.process.rendezvous == "tcp://127.0.0.1:29500"
    assert "MASTER_PORT" in survey.notes[0]
    assert survey_process(CLUSTERS, {**MPICH, "PBS_JOBID": "17.host"}).notes == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"MASTER_PORT": "1234"}, "tcp://127.0.0.1:1234"),
        ({"MASTER_ADDR": "node0"}, "tcp://node0:29500"),
        ({"MASTER_ADDR": "fe80::1"}, "tcp://[fe80::1]:29500"),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}, "env://"),
    ],
)
def test_master_variables_beat_the_derived_meeting_point(given, expected):
    assert detect_process(CLUSTERS, {**MPICH, **given}).rendezvous == expected


def test_mpi_on_several_machines_needs_an_address():
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    with pytest.raises(
        EnvironmentDetectionError, match=r"several machines.*MASTER_ADDR isn't set.*mpirun -x MASTER_ADDR"
    ):
        detect_process(CLUSTERS, environ)
    process = detect_process(CLUSTERS, {**environ, "MASTER_ADDR": "node0"})
    assert process.node_rank == 1
    assert process.rendezvous.startswith("tcp://node0:2")


def test_an_init_method_of_the_users_needs_no_variables():
    survey = survey_process(CLUSTERS, torchrun(0, 2), init_method="file:///tmp/meet")
    assert survey.process.rendezvous == "file:///tmp/meet"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, 0, "single")),
        ({"RANK": "", "WORLD_SIZE": " "}, (0, 1, 0, 1, 0, "single")),
        ({"WORLD_SIZE": "1"}, (0, 1, 0, 1, 0, "single")),
        ({"LOCAL_RANK": "0"}, (0, 1, 0, 1, 0, "single")),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (0, 1, 0, 1, 0, "single")),
        (torchrun(0, 1), (0, 1, 0, 1, 0, "torchrun")),
        (torchrun(1, 2, 1, 2, 0, **MEETING), (1, 2, 1, 2, 0, "torchrun")),
        (torchrun(1, 2, **MEETING), (1, 2, 1, 2, 0, "torchrun")),
        (torchrun(5, 8, 1, 4, 1, **MEETING), (5, 8, 1, 4, 1, "torchrun")),
        (torchrun(5, 8, 1, 4, **MEETING), (5, 8, 1, 4, 1, "torchrun")),
        (torchrun(5, 8, 1, **MEETING), (5, 8, 1, 4, 1, "torchrun")),
        (torchrun(3, 8, 3, **MEETING), (3, 8, 3, 8, 0, "torchrun")),
    ],
)
def test_rank_style_variables(environ, expected):
    p = detect_process(CLUSTERS, environ)
    assert (p.rank, p.world_size, p.local_rank, p.local_world_size, p.node_rank, p.cluster) == expected


def test_assumptions_are_said():
    assert "one machine" in survey_process(CLUSTERS, torchrun(1, 2, **MEETING)).notes[0]
    assert "4 processes per machine" in survey_process(CLUSTERS, torchrun(5, 8, 1, **MEETING)).notes[0]
    assert survey_process(CLUSTERS, torchrun(1, 2, 1, 2, 0, **MEETING)).notes == ()


HALF_SET = {
    "rank alone": ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE isn't set"]),
    "world size alone": ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK isn't set"]),
    "local rank alone": ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "RANK and WORLD_SIZE aren't set"]),
    "local world size alone": ({"LOCAL_WORLD_SIZE": "2"}, ["LOCAL_WORLD_SIZE=2"]),
    "rank with local rank": ({"RANK": "1", "LOCAL_RANK": "1"}, ["RANK=1", "LOCAL_RANK=1", "WORLD_SIZE isn't set"]),
    "rank beyond": (torchrun(4, 4, **MEETING), ["RANK=4", "WORLD_SIZE=4", "0 to 3"]),
    "empty world": (torchrun(0, 0), ["WORLD_SIZE=0", "empty"]),
    "text": ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'", "integer"]),
    "fraction": ({"RANK": "0", "WORLD_SIZE": "2.5"}, ["WORLD_SIZE='2.5'", "integer"]),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK='-1'", "unset RANK"]),
    "negative world": ({"RANK": "0", "WORLD_SIZE": "-2"}, ["WORLD_SIZE='-2'"]),
    "local rank beyond": (torchrun(2, 4, 2, 2, **MEETING), ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2", "0 to 1"]),
    "local world beyond": (torchrun(1, 2, 1, 4, **MEETING), ["LOCAL_WORLD_SIZE=4", "more than 2"]),
    "local rank missing": (torchrun(3, 4, None, 2, **MEETING), ["several machines", "set LOCAL_RANK"]),
    "local rank missing, second machine": (torchrun(3, 4, None, None, 1, **MEETING), ["set LOCAL_RANK"]),
    "nowhere to meet": (torchrun(0, 2, 0, 2), ["MASTER_ADDR and MASTER_PORT aren't set"]),
    "no port": (torchrun(0, 2, 0, 2, MASTER_ADDR="a"), ["since MASTER_PORT isn't set"]),
    "bad port": (torchrun(0, 2, 0, 2, MASTER_ADDR="a", MASTER_PORT="http"), ["MASTER_PORT='http'"]),
    "port too large": (torchrun(0, 2, 0, 2, MASTER_ADDR="a", MASTER_PORT="70000"), ["1 to 65535"]),
    "openmpi size missing": ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE isn't set"]),
    "openmpi rank missing": ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK isn't set"]),
    "openmpi rank beyond": ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, ["ranks go from 0 to 1"]),
    "mpich size missing": ({"PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, ["PMI_SIZE isn't set"]),
    "mpich local rank beyond": ({**MPICH, "MPI_LOCALRANKID": "2"}, ["MPI_LOCALRANKID=2", "0 to 1"]),
    "intel rank missing": ({"I_MPI_HYDRA_UUID": "x", "PMI_SIZE": "2"}, ["PMI_RANK isn't set"]),
    "mvapich size missing": ({"MV2_COMM_WORLD_RANK": "1"}, ["MV2_COMM_WORLD_SIZE/MVP_COMM_WORLD_SIZE isn't set"]),
    "mvapich text": ({**MVAPICH2, "MV2_COMM_WORLD_SIZE": "many"}, ["MV2_COMM_WORLD_SIZE='many'"]),
}


@pytest.mark.parametrize("name", HALF_SET)
def test_half_set_and_impossible_environments_name_variables_and_remedy(name):
    environ, fragments = HALF_SET[name]
    with pytest.raises(EnvironmentDetectionError) as caught:
        detect_process(CLUSTERS, environ)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "drivetrain launch" in str(caught.value) or "MASTER_PORT" in str(caught.value)


def test_an_explicit_launcher_stands_above_what_it_runs_under():
    under_mpi = {**OPEN_MPI, **torchrun(5, 8, 1, 4, 1, **MEETING)}
    survey = survey_process(CLUSTERS, under_mpi)
    assert (survey.process.rank, survey.process.cluster) == (5, "torchrun")
    assert [name for name, _ in survey.rejected] == ["openmpi"]
    assert "OMPI_COMM_WORLD_RANK=1" in survey.rejected[0][1]
    assert "contradicts" in survey.rejected[0][1]


def test_a_wrapper_that_exports_half_of_what_mpi_says_is_fine():
    process = detect_process(CLUSTERS, {**OPEN_MPI, "LOCAL_RANK": "1"})
    assert (process.cluster, process.rank) == ("openmpi", 1)
    process = detect_process(CLUSTERS, {**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2", **MEETING})
    assert (process.cluster, process.local_rank, process.local_world_size) == ("torchrun", 1, 2)


def test_a_wrapper_that_contradicts_mpi_is_an_error():
    with pytest.raises(EnvironmentDetectionError, match=r"LOCAL_RANK=0 is set.*OMPI_COMM_WORLD_RANK=1"):
        detect_process(CLUSTERS, {**OPEN_MPI, "LOCAL_RANK": "0"})


def test_what_is_missing_comes_from_a_cluster_that_agrees():
    two_machines = {
        **OPEN_MPI,
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }
    survey = survey_process(CLUSTERS, {**two_machines, **MEETING})
    p = survey.process
    assert (p.rank, p.local_rank, p.local_world_size, p.node_rank) == (3, 1, 2, 1)
    assert survey.notes == ()


def test_order_of_specs_decides_nothing():
    environ = {**OPEN_MPI, **INTEL_MPI, **torchrun(0, 1)}
    results = {str(survey_process(order, environ)) for order in itertools.permutations(CLUSTERS)}
    assert len(results) == 1


def test_equal_priorities_that_contradict_are_an_error():
    one = ClusterSpec(name="one", rank=("A_RANK",), world_size=("A_SIZE",))
    two = ClusterSpec(name="two", rank=("B_RANK",), world_size=("B_SIZE",))
    environ = {"A_RANK": "0", "A_SIZE": "1", "B_RANK": "0", "B_SIZE": "1"}
    assert detect_process([two, one], environ).cluster == "one"
    with pytest.raises(EnvironmentDetectionError, match=r"contradicts.*both have the priority 100"):
        detect_process([one, two], {**environ, "B_SIZE": "2"})


def nodes(environ):
    """A cluster that must compute: rank from a list of hosts."""
    hosts = environ["TOY_HOSTS"].split(",")
    if environ["TOY_ME"] == "outside":
        return None
    rank = hosts.index(environ["TOY_ME"])
    return ProcessInfo(
        rank=rank, world_size=len(hosts), node_rank=rank, rendezvous=f"tcp://{hosts[0]}:7777", reason="TOY_HOSTS"
    )


def test_a_cluster_may_compute():
    spec = ClusterSpec(name="toy", target=f"{nodes.__module__}:nodes", marker=("TOY_HOSTS",), priority=150)
    assert nodes.__module__ in __import__("sys").modules
    environ = {"TOY_HOSTS": "a,b,c", "TOY_ME": "b"}
    process = detect_process([*CLUSTERS, spec], environ)
    assert (process.rank, process.world_size, process.node_rank, process.cluster) == (1, 3, 1, "toy")
    assert process.rendezvous == "tcp://a:7777"
    assert detect_process([*CLUSTERS, spec], {**environ, "TOY_ME": "outside"}).cluster == "single"
    assert detect_process([*CLUSTERS, spec], {}).cluster == "single"
    # torchrun's variables stand above it
    assert detect_process([*CLUSTERS, spec], {**environ, **torchrun(0, 1)}).cluster == "torchrun"


def test_the_environment_is_only_read():
    environ = torchrun(1, 2, **MEETING)
    before, real = dict(environ), dict(os.environ)
    detect_process(CLUSTERS, environ)
    assert environ == before
    assert dict(os.environ) == real


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_process_of_a_homogeneous_job_finds_its_place(machines, per_machine, data):
    world = machines * per_machine
    rank = data.draw(st.integers(0, world - 1))
    node, local = divmod(rank, per_machine)
    told = data.draw(st.sets(st.sampled_from(["LOCAL_WORLD_SIZE", "GROUP_RANK"])))
    environ = torchrun(rank, world, local, per_machine, node, **MEETING)
    environ = {k: v for k, v in environ.items() if k not in ("LOCAL_WORLD_SIZE", "GROUP_RANK") or k in told}
    process = detect_process(CLUSTERS, environ)
    assert (process.rank, process.local_rank) == (rank, local)
    if "LOCAL_WORLD_SIZE" in told:
        assert (process.local_world_size, process.node_rank) == (per_machine, node)
    if "GROUP_RANK" in told:
        assert process.node_rank == node
    assert process.local_rank < process.local_world_size <= world


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                "GROUP_RANK",
                "PMI_RANK",
                "PMI_SIZE",
                "MASTER_ADDR",
            ]
        ),
        st.sampled_from(["", "0", "1", "2", "4", "-1", "x", "1.5"]),
    )
)
def test_any_environment_gives_a_consistent_process_or_a_clear_error(environ):
    try:
        p = detect_process(CLUSTERS, environ)
    except EnvironmentDetectionError as error:
        assert "set" in str(error)
        return
    assert 0 <= p.rank < p.world_size
    assert 0 <= p.local_rank < p.local_world_size <= p.world_size
    assert p.node_rank >= 0
