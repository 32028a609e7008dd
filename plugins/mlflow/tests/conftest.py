"""What the tests of this plugin share."""

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A database with all its tables: making them takes seconds, copying it none."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path
