"""What commands print with ``--json`` is what their schemas say, and a schema refuses what is not."""

from __future__ import annotations

import json
from itertools import chain

import pytest

import ridgeline as rl
from lab import schemas
from ridgeline.sim.serving.workload import closed

jsonschema = pytest.importorskip("jsonschema")


def schema(command: str) -> dict[str, object]:
    return json.loads((schemas.FOLDER / f"{command}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return schemas.sample_files(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize("command", sorted({name.split()[0] for name in schemas.SAMPLES}))
def test_the_schema_of_a_command_is_that_of_what_it_prints(command, files):
    """As ``python -m lab.schemas`` makes it: a key that comes or goes is a change of the stored schema."""
    stored = schema(command)
    jsonschema.Draft202012Validator.check_schema(stored)
    found = schemas.documents(command, files)
    for document in chain(*found.values()):
        jsonschema.validate(document, stored)
    assert schemas.schema(command, found) == stored


@pytest.mark.parametrize("command", ["diff", "simulate"])
def test_a_document_without_a_key_or_with_another_type_is_refused(command, files):
    stored, document = schema(command), schemas.documents(command, files)[command][0]
    number = next(key for key, value in document.items() if isinstance(value, float))
    required = stored["required"][-1]
    for wrong in ({**document, number: "1.0"}, {**document, "schema": "ridgeline.other/1"},
                  {key: value for key, value in document.items() if key != required}):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, stored)


def test_results_in_python_have_the_layout_of_the_command():
    step = rl.simulate("llama3-8b", "h100-sxm*4", tp=4, global_batch=8)
    document = {"schema": "ridgeline.simulate/1", "run": None, **json.loads(step.to_json())}
    jsonschema.validate(document, schema("simulate"))
    made = rl.serve("llama3-8b", "h200*1", closed(4, 64, 16))
    jsonschema.validate({"schema": "ridgeline.serve/1", **json.loads(made.to_json())}, schema("serve"))


def test_schemas_are_printed_and_an_unknown_one_says_which_there_are(ridgeline):
    assert ridgeline("schema").out.split() == sorted(path.stem for path in schemas.FOLDER.glob("*.json"))
    assert json.loads(ridgeline("schema", "predict").out) == schema("predict")
    assert "did you mean 'predict'" in ridgeline("schema", "predikt").err
