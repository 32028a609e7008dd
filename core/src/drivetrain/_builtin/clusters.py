"""Variables by which a process learns its rank: a table. Clusters with an API of their own belong to plugins."""

from __future__ import annotations

from drivetrain.specs import ClusterSpec

__all__ = ["CLUSTERS"]

#: Batch systems whose job id is seen by every process, for launchers that export none of their own.
_BATCH_JOB = ("PMI_JOBID", "PBS_JOBID", "LSB_JOBID")

CLUSTERS = (
    ClusterSpec(
        name="torchrun",
        summary="RANK-style variables: drivetrain launch, torchrun, and scripts that set them",
        marker=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        priority=200,
    ),
    ClusterSpec(
        name="openmpi",
        summary="Open MPI and its relatives",
        marker=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is the rank on the machine over all jobs, not the machine's rank.
        job_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", *_BATCH_JOB),
        priority=60,
    ),
    ClusterSpec(
        name="mvapich",
        summary="MVAPICH",
        marker=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
        rank=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        world_size=("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        job_id=("MPIRUN_ID", "PMI_PORT", *_BATCH_JOB),
        priority=58,
    ),
    ClusterSpec(
        name="intel-mpi",
        summary="Intel MPI",
        marker=("I_MPI_HYDRA_UUID",),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job_id=("I_MPI_HYDRA_UUID",),
        priority=56,
    ),
    ClusterSpec(
        name="mpich",
        summary="MPICH and other launchers that speak PMI",
        marker=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job_id=_BATCH_JOB,
        priority=54,
    ),
    ClusterSpec(name="single", summary="a plain process", required=(), priority=0),
)
