//! Requests to the API without a connection.

use serde_json::{Value, json};

use super::{Api, ApiReply, ApiRequest, ApiResponse};
use crate::methods::TABLE;
use crate::passed_fd::PassedFd;
use crate::process_parts::ProcessParts;
use crate::route::tests::RESOURCE;

fn answer_of(api: &Api, verb: &str, target: &str, body: &str) -> ApiResponse {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let passed = &PassedFd::default();
    let (client, body, accept) = ("tester", body.as_bytes(), "*/*");
    match api.answer(ApiRequest { verb, path, query, accept, body, client, passed }) {
        ApiReply::Now(response) => response,
        other => panic!("{other:?}"),
    }
}

fn resource() -> Api {
    Api::new(&RESOURCE, ProcessParts::new())
}

fn value_of(response: &ApiResponse) -> Value {
    serde_json::from_slice(&response.body).unwrap()
}

#[test]
fn parameters_come_from_path_query_and_body() {
    let api = resource();
    for (verb, target, body, status, expected) in [
        (
            "PATCH",
            "/v1/namespaces/nqn%3Aa/3",
            r#"{"device":"ram:1g"}"#,
            200,
            json!({ "subsystem": "nqn:a", "nsid": 3, "device": "ram:1g" }),
        ),
        (
            "DELETE",
            "/v1/namespaces/s/3?force=yes",
            "",
            200,
            json!({ "subsystem": "s", "nsid": 3, "force": true }),
        ),
        (
            "POST",
            "/v1/namespaces",
            r#"{"subsystem":"s","nsid":1}"#,
            201,
            json!({ "subsystem": "s", "nsid": 1 }),
        ),
        ("GET", "/v1/namespaces?tag=a+b&tag=%C3%A4", "", 200, json!({ "tag": ["a b", "ä"] })),
        ("GET", "/v1/namespaces/s/1", " \n", 200, json!({ "subsystem": "s", "nsid": 1 })),
    ] {
        let response = answer_of(&api, verb, target, body);
        let value = value_of(&response);
        assert_eq!(response.status, status, "{verb} {target}: {value}");
        for (name, expected) in expected.as_object().unwrap() {
            assert_eq!(&value[name], expected, "{verb} {target}: {name}");
        }
        assert_eq!(response.changed.is_some(), verb != "GET");
    }
}

#[test]
fn change_is_an_event_with_client_method_and_parameters() {
    let response = answer_of(&resource(), "DELETE", "/v1/namespaces/s/3", "");
    let event = response.changed.unwrap();
    let expected = r#"tester called delete_namespace with {"nsid":3,"subsystem":"s"}"#;
    assert_eq!(event.text, expected);
    assert_eq!(event.about["client"], "tester");
}

#[test]
fn invalid_request_is_refused_with_its_status_and_reason() {
    let api = resource();
    for (verb, target, body, status, message) in [
        (
            "GET",
            "/v1/namespaces?tags=a",
            "",
            400,
            "get namespaces: no parameter `tags`, expected tag",
        ),
        ("GET", "/v1/namespaces?tag", "", 400, "get namespaces: tag is ``, expected a text of"),
        ("GET", "/v1/namespaces?tag=%", "", 400, "request: query `tag=%` is not percent-encoded"),
        ("GET", "/v1/namespaces", "{}", 400, "request: it has a body, expected parameters in"),
        ("GET", "/v1/namespace?nsid=1&nsid=2", "", 400, "get namespace: `nsid` is given twice"),
        ("GET", "/v1/namespaces/s/10", "", 400, "get namespace: nsid is 10, expected a whole"),
        ("GET", "/v1/namespace?nsid=1", "", 400, "get namespace: subsystem is missing, expected"),
        (
            "PATCH",
            "/v1/namespaces/s/1",
            r#"{"nsid":1}"#,
            400,
            "set namespace: `nsid` is given twice",
        ),
        (
            "POST",
            "/v1/mode",
            r#"{"device":"a","device":"b"}"#,
            400,
            "request: body: member `device`",
        ),
        ("POST", "/v1/mode", "[]", 400, "request: body is a list, expected an object"),
        ("POST", "/v1/mode", "{", 400, "request: body: EOF while parsing"),
        ("POST", "/v1/modes", "", 404, "no path `/v1/modes`, expected one of those in"),
        ("GET", "/v1/mode", "", 405, "no request `GET` for `/v1/mode`, expected POST"),
        ("POST", "/readyz", "", 405, "no request `POST` for `/readyz`, expected GET, HEAD"),
        (
            "POST",
            "/v1/mode",
            r#"{"device":"NVMeTLSkey-1:01:AAAA:"}"#,
            400,
            "request: it holds a key",
        ),
        ("GET", "/v1/namespaces?tag=NVMeTLSkey-1%3A01%3AAAAA:", "", 400, "request: it holds a key"),
    ] {
        let response = answer_of(&api, verb, target, body);
        let error = &value_of(&response)["error"];
        let found = error["message"].as_str().unwrap();
        assert_eq!(response.status, status, "{verb} {target}: {found}");
        assert!(found.starts_with(message), "{verb} {target}: {found}");
        assert_eq!(response.changed, None);
        let allow = response.headers.iter().any(|(name, _)| *name == "allow");
        assert_eq!(allow, status == 405);
    }
}

#[test]
fn process_without_a_readiness_is_ready() {
    let response = answer_of(&resource(), "GET", "/readyz", "");
    assert_eq!((response.status, response.body.as_slice()), (200, &b"serving\n"[..]));
    let response = answer_of(&resource(), "HEAD", "/healthz", "");
    assert_eq!((response.status, response.body.as_slice()), (200, &b"ok\n"[..]));
}

#[test]
fn metrics_have_the_format_that_the_client_accepts() {
    let passed = &PassedFd::default();
    for (accept, expected) in [
        ("*/*", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text"),
    ] {
        let (verb, path, query, client) = ("GET", "/metrics", "", "tester");
        let request = ApiRequest { verb, path, query, accept, body: b"", client, passed };
        let ApiReply::Now(response) = resource().answer(request) else { panic!("{accept}") };
        assert!(response.content_type.starts_with(expected), "{}", response.content_type);
        assert!(response.body.starts_with(b"# "), "{:?}", response.body);
    }
    assert_eq!(answer_of(&resource(), "POST", "/metrics", "").status, 405);
}

#[test]
fn every_get_method_of_the_program_has_a_path() {
    let api = Api::new(&TABLE, ProcessParts::new());
    let document = value_of(&answer_of(&api, "GET", "/v1/openapi.json", ""));
    for method in TABLE.methods() {
        let is_there = document["paths"].as_object().unwrap().values().any(|item| {
            let mut operations = item.as_object().unwrap().values();
            operations.any(|operation| operation["operationId"] == method.request_name().as_str())
        });
        assert!(is_there, "{}", method.request_name());
    }
    assert_eq!(answer_of(&api, "GET", "/v1/methods", "").status, 200);
}
