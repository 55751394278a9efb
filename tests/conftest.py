import pytest

from tests import data


@pytest.fixture(scope="session")
def token_data(tmp_path_factory):
    """Prefix of a token data set, for --data-path."""
    return data.write_tokens(tmp_path_factory.mktemp("data") / "tokens_document")
