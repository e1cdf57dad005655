"""Every error of an application leaves in the service's form, whichever library raised it."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from rollout_service.errors import Overloaded, RolloutServiceError, VersionConflict, error_classes, from_wire
from rollout_service.web.errors import install_error_handlers


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    n: int
    names: list[str] = []


def application() -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/body")
    async def body(body: Body) -> dict[str, int]:
        return {"n": body.n}

    @app.get("/query")
    async def query(timeout_s: float) -> float:
        return timeout_s

    @app.get("/service/{name}")
    async def service(name: str) -> None:
        raise error_classes()[name]("it went wrong", {"where": name})

    @app.get("/http/{status}")
    async def http(status: int) -> None:
        raise HTTPException(status, "no such luck", headers={"X-Why": "because"})

    @app.get("/bug")
    async def bug() -> None:
        raise KeyError("a secret of the inside")

    return app


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        yield http


def error_of(reply: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert reply.status_code == status and reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"type", "message", "detail"} and error["type"] == kind
    return error


class TestOurs:
    async def test_each_error_has_its_status_and_comes_back_as_itself(self, http):
        for name, cls in error_classes().items():
            reply = await http.get(f"/service/{name}")
            error_of(reply, cls.http_status, name)
            again = from_wire(reply.status_code, reply.json())
            assert type(again) is cls and again.message == "it went wrong" and again.detail == {"where": name}

    @pytest.mark.parametrize("detail", [None, "upstream reset", ["a"], [["a", 1]], 3])
    def test_a_detail_of_another_server_that_is_no_mapping_is_left_out(self, detail):
        error = from_wire(502, {"error": {"message": "bad gateway", "detail": detail}})
        assert (type(error), error.message, error.detail) == (RolloutServiceError, "bad gateway", {})

    async def test_an_error_that_passes_says_when_to_come_back(self, http):
        assert (await http.get("/service/Overloaded")).headers["retry-after"] == f"{Overloaded.retry_after_s:g}"
        assert VersionConflict.retry_after_s is None
        assert "retry-after" not in (await http.get("/service/VersionConflict")).headers


class TestValidation:
    async def test_every_field_that_is_wrong_is_named(self, http):
        error = error_of(await http.post("/body", json={"n": "x", "names": ["a", 3], "m": 1}), 422, "InvalidRequest")
        assert error["message"].startswith("POST /body: ")
        fields = {item["field"]: item["problem"] for item in error["detail"]["fields"]}
        assert set(fields) == {"n", "names.1", "m"}
        assert "valid integer" in fields["n"]
        assert fields["m"] == "is not a field here, or not implemented: leave it out"
        assert all(field in error["message"] for field in fields)

    async def test_a_message_stays_short_when_everything_is_wrong(self, http):
        error = error_of(await http.post("/body", json={"n": 1, "names": [0] * 500}), 422, "InvalidRequest")
        assert len(error["message"]) < 1000 and "names.0" in error["message"]

    async def test_missing_fields_and_query_parameters_are_named(self, http):
        error = error_of(await http.post("/body", json={}), 422, "InvalidRequest")
        assert error["detail"]["fields"] == [{"field": "n", "problem": "Field required"}]
        error = error_of(await http.get("/query?timeout_s=soon"), 422, "InvalidRequest")
        assert "timeout_s" in error["message"]

    @pytest.mark.parametrize(("body", "where"), [(b'{"n": 1,', "at character"), (b'{"n": "\xff"}', "")])
    async def test_a_body_that_is_not_json_is_malformed_and_says_where(self, http, body, where):
        reply = await http.post("/body", content=body, headers={"Content-Type": "application/json"})
        error = error_of(reply, 400, "MalformedRequest")
        assert "the body" in error["message"] and where in error["message"]

    @pytest.mark.parametrize(
        ("body", "headers"),
        [(b"[1, 2]", {"Content-Type": "application/json"}), (b'{"n": 1}', {"Content-Type": "text/plain"}), (b"", {})],
        ids=["a list", "another content type", "nothing"],
    )
    async def test_a_body_that_is_no_json_object_says_what_to_send(self, http, body, headers):
        error = error_of(await http.post("/body", content=body, headers=headers), 422, "InvalidRequest")
        assert "the body must be a JSON object sent with Content-Type: application/json" in error["message"]


class TestFramework:
    async def test_errors_of_the_framework_keep_status_headers_and_text(self, http):
        kinds = {400: "MalformedRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}
        for status, kind in (kinds | {418: "RolloutServiceError"}).items():
            reply = await http.get(f"/http/{status}")
            error = error_of(reply, status, kind)
            assert error["message"] == f"GET /http/{status}: no such luck" and error["detail"] == {"status": status}
            assert reply.headers["x-why"] == "because"
        assert error_of(await http.get("/nothing"), 404, "NotFound")["message"] == "GET /nothing: Not Found"
        error_of(await http.get("/body"), 405, "RolloutServiceError")

    async def test_a_bug_is_answered_without_internals_and_reaches_the_log(self, http, caplog):
        error = error_of(await http.get("/bug"), 500, RolloutServiceError.__name__)
        assert "GET /bug failed with KeyError" in error["message"] and "secret" not in str(error)
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as raising:
            with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="secret"):
                await raising.get("/bug")
