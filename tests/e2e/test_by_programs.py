"""What programs do with a dashboard that runs: the documentation's examples, and a client made from the schema."""

import importlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e import examples
from tests.e2e.rest import Rest
from tests.harness.services import Dashboard

#: Not of a browser, but of the dashboard that the browsers' stage has.
pytestmark = pytest.mark.browser


@dataclass(frozen=True)
class Automated:
    """Where it answers, and the tokens of an operator and an admin."""

    url: str
    operator: str
    admin: str

    @property
    def environment(self) -> dict[str, str]:
        return {"DASHBOARD": self.url, "TOKEN": self.operator, "ADMIN_TOKEN": self.admin}


@pytest.fixture(scope="module")
def automated(dashboard: Dashboard, rest: Rest) -> Automated:
    rest.scan()
    rest.quiet()
    tokens = [
        dashboard.manage("create_token", f"examples {role}", "--role", role).strip() for role in ("operator", "admin")
    ]
    return Automated(dashboard.url, *tokens)


@pytest.mark.parametrize("language", ["sh", "python"])
def test_the_documentations_examples_do_what_they_say(automated: Automated, tmp_path: Path, language: str) -> None:
    assert len(examples.blocks(language)) >= 7
    said = examples.run(language, tmp_path, **automated.environment)
    shown = {
        "sh": ["predicted_after_bytes", '"state": "succeeded"', "storage_admin_pool_available_bytes{"],
        "python": ["undo", "chosen:", "left out:", "freed:", "job,at,kind", "test 20"],
    }
    for words in shown[language]:
        assert words in said, words


@pytest.mark.parametrize(
    ("document", "shown"),
    [("policies.md", ['"chosen_count"', "The job would free", "true"]), ("ledger.md", ['"freed_bytes"'])],
)
def test_the_examples_of_other_pages_do_what_they_say(
    automated: Automated, tmp_path: Path, document: str, shown: list[str]
) -> None:
    assert examples.blocks("sh", document)
    said = examples.run("sh", tmp_path, document, **automated.environment)
    for words in shown:
        assert words in said, said


@pytest.fixture(scope="module")
def generated(automated: Automated, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The client that the generator makes of the schema as it is served; a warning of it fails."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "config.yaml").write_text("post_hooks: []\n")
    argv = [sys.executable, "-m", "openapi_python_client", "generate", "--url", f"{automated.url}/api/v1/schema/"]
    argv += ["--meta", "none", "--output-path", str(folder / "sa_generated"), "--config", str(folder / "config.yaml")]
    made = subprocess.run([*argv, "--fail-on-warning"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    sys.path.insert(0, str(folder))
    try:
        load = importlib.import_module
        return SimpleNamespace(
            client=load("sa_generated").AuthenticatedClient(
                base_url=automated.url, token=automated.operator, raise_on_unexpected_status=True
            ),
            models=load("sa_generated.models"),
            images_list=load("sa_generated.api.images.images_list"),
            history=load("sa_generated.api.images.images_history_retrieve"),
            submit=load("sa_generated.api.jobs.jobs_create"),
            job=load("sa_generated.api.jobs.jobs_retrieve"),
            log=load("sa_generated.api.jobs.jobs_log_retrieve"),
            summary=load("sa_generated.api.ledger.ledger_summary_retrieve"),
        )
    finally:
        sys.path.remove(str(folder))


def body(made: Any, image: Any, **more: Any) -> Any:
    return made.models.JobBodyRequest.from_dict({"kind": "reclaim", "image": image.id, **more})


def test_a_client_made_from_the_schema_lists_plans_submits_and_follows(generated: Any) -> None:
    made, client = generated, generated.client
    listed = made.images_list.sync(
        client=client,
        state=made.models.ImagesListState.OK,
        in_use=made.models.ImagesListInUse.FALSE,
        ordering=made.models.ImagesListOrdering.RECLAIMABLE_BYTES_DESC,
    )
    assert listed.count == len(listed.results) > 5
    plans = {
        image.id: (image, made.submit.sync(client=client, body=body(made, image, dry_run=True)))
        for image in listed.results
    }
    image, plan = next(
        (image, plan) for image, plan in plans.values() if not plan.refusals and plan.predicted_after_bytes is not None
    )
    assert isinstance(plan, made.models.Plan)
    accepted = made.submit.sync_detailed(client=client, body=body(made, image), idempotency_key="generated")
    assert accepted.status_code == 202
    again = made.submit.sync(client=client, body=body(made, image), idempotency_key="generated")
    assert again.id == accepted.parsed.id
    job, deadline = accepted.parsed, time.monotonic() + 120
    while job.state in {made.models.JobState.QUEUED, made.models.JobState.RUNNING}:
        assert time.monotonic() < deadline, job
        time.sleep(0.3)
        job = made.job.sync(job.id, client=client)
    assert job.state == made.models.JobState.SUCCEEDED, job.error
    assert job.undo.available is True
    assert job.started < job.finished
    log = made.log.sync(job.id, client=client)
    assert log.results
    assert all(line.text for line in log.results)
    assert made.history.sync(image.id, client=client).results[0].allocated_size > 0
    assert made.summary.sync(client=client).held_count >= 1


def test_a_refusal_is_an_error_with_a_code_for_a_client_made_from_the_schema(generated: Any) -> None:
    made, client = generated, generated.client
    broken = made.images_list.sync(client=client, state=made.models.ImagesListState.CHAIN_BROKEN).results[0]
    refused = made.submit.sync_detailed(client=client, body=body(made, broken))
    assert refused.status_code == 409
    assert isinstance(refused.parsed, made.models.Error)
    assert refused.parsed.code == "chain_broken"
    assert len(refused.parsed.detail) > 20
    plan = made.submit.sync(client=client, body=body(made, broken, dry_run=True))
    assert [refusal.code for refusal in plan.refusals][:1] == ["chain_broken"]
