//! OpenAPI 3.1 document of the HTTP API, generated from the table of methods.

use serde_json::{Map, Value, json};

use crate::json_schema::parameters_schema;
use crate::method::{Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::route::{HttpVerb, Route, RouteTable};

/// Document of these routes.
pub(crate) fn openapi_document(routes: &RouteTable) -> Value {
    let mut paths = Map::new();
    for route in routes.routes() {
        let path = paths.entry(route.template()).or_insert_with(|| json!({}));
        path[route.verb.name().to_ascii_lowercase()] = operation(route);
    }
    paths.extend(fixed_paths());
    let kinds: Vec<&str> = routes.table().events().map(|kind| kind.name).collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "tenmil",
            "description": "Methods of a running tenmil process.",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "security": [{}, { "token": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "the content of the file of --control-token",
                },
            },
            "schemas": { "Error": error_schema(), "Event": event_schema(&kinds) },
        },
    })
}

fn operation(route: &Route) -> Value {
    let method = route.method;
    let is_key = |parameter: &Parameter| route.key.iter().any(|one| one.name == parameter.name);
    let others: Vec<&'static Parameter> =
        method.parameters.iter().filter(|one| !is_key(one)).collect();
    let has_body = matches!(route.verb, HttpVerb::Post | HttpVerb::Patch);
    let mut parameters: Vec<Value> = route.key.iter().map(|one| path_parameter(one)).collect();
    if !has_body {
        parameters.extend(others.iter().map(|one| query_parameter(one)));
    }
    let mut operation = json!({
        "operationId": operation_id(route),
        "summary": method.help,
        "tags": [method.name],
        "parameters": parameters,
        "responses": responses(method),
    });
    if has_body {
        let required = others.iter().any(|one| one.need == ParamDefault::Required);
        operation["requestBody"] = json!({
            "required": required,
            "content": { "application/json": { "schema": parameters_schema(&others) } },
        });
    }
    operation
}

/// A method that has two requests is named for the second by its verb.
fn operation_id(route: &Route) -> String {
    let name = route.method.request_name();
    match (route.method.verb, route.key.is_empty()) {
        (MethodKind::Get, false) => format!("{name}_by_key"),
        (MethodKind::Set, false) => format!("{name}_by_key"),
        _ => name,
    }
}

fn path_parameter(parameter: &Parameter) -> Value {
    json!({
        "name": parameter.name,
        "in": "path",
        "required": true,
        "description": parameter.help,
        "schema": parameter.kind.json_schema(),
    })
}

fn query_parameter(parameter: &Parameter) -> Value {
    let mut schema = match parameter.kind {
        // In a query a list is a repeated parameter.
        ParamType::Texts { len_max, count_max } => json!({
            "type": "array",
            "items": ParamType::Text { len_max }.json_schema(),
            "maxItems": count_max,
        }),
        kind => kind.json_schema(),
    };
    if let ParamDefault::Default(text) = parameter.need
        && let Ok(value) = parameter.kind.parse_text(text)
    {
        schema["default"] = value;
    }
    json!({
        "name": parameter.name,
        "in": "query",
        "required": parameter.need == ParamDefault::Required,
        "description": parameter.help,
        "schema": schema,
    })
}

fn responses(method: &Method) -> Value {
    let (status, description) = match method.verb {
        MethodKind::Create => ("201", "created"),
        _ => ("200", "result"),
    };
    let content = if method.verb == MethodKind::Subscribe {
        json!({ "text/event-stream": {
            "schema": {
                "type": "string",
                "description": "server-sent events; the data of each are an Event",
            },
        } })
    } else {
        json!({ "application/json": { "schema": method.answer.json_schema() } })
    };
    json!({
        status: { "description": description, "content": content },
        "default": {
            "description": "error",
            "content": {
                "application/json": { "schema": { "$ref": "#/components/schemas/Error" } },
            },
        },
    })
}

/// Paths that are not of methods.
fn fixed_paths() -> Map<String, Value> {
    let text = |id: &str, summary: &str, statuses: &[(&str, &str)]| {
        let response = |description: &str| {
            json!({
                "description": description,
                "content": { "text/plain": { "schema": { "type": "string" } } },
            })
        };
        let responses: Map<_, _> = statuses
            .iter()
            .map(|(status, description)| ((*status).to_owned(), response(description)))
            .collect();
        json!({ "get": {
            "operationId": id, "summary": summary, "tags": ["process"], "responses": responses,
        } })
    };
    let paths = [
        ("/healthz", text("healthz", "Show that the process answers", &[("200", "it answers")])),
        (
            "/readyz",
            text(
                "readyz",
                "Show whether the process serves",
                &[("200", "it serves"), ("503", "it starts or ends")],
            ),
        ),
        (
            "/metrics",
            text(
                "metrics",
                "Show the counters for Prometheus",
                &[("200", "text format of Prometheus, or OpenMetrics if the client accepts it")],
            ),
        ),
    ];
    paths.into_iter().map(|(path, item)| (path.to_owned(), item)).collect()
}

fn error_schema() -> Value {
    let codes: Vec<&str> = crate::ErrorCode::ALL.iter().map(|(_, name, ..)| *name).collect();
    json!({
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "category", "message"],
                "properties": {
                    "code": { "type": "string", "examples": codes },
                    "category": { "enum": ["usage", "environment", "remote"] },
                    "message": { "type": "string", "description": "one line for people" },
                    "hint": { "type": "string", "description": "next step to take" },
                },
            },
        },
    })
}

fn event_schema(kinds: &[&str]) -> Value {
    json!({
        "type": "object",
        "required": ["kind", "time", "monotonic_ns", "text", "about"],
        "properties": {
            "kind": { "type": "string", "examples": kinds },
            "time": { "type": "string", "format": "date-time" },
            "monotonic_ns": {
                "type": "integer",
                "description": "kernel's monotonic clock, which orders the events of a machine",
            },
            "text": { "type": "string", "description": "one line for people" },
            "about": { "type": "object", "description": "for programs" },
        },
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::openapi_document;
    use crate::route::RouteTable;
    use crate::route::tests::RESOURCE;

    #[test]
    fn document_has_every_request_with_its_parameters() {
        let document = openapi_document(&RouteTable::new(&RESOURCE));
        let item = &document["paths"]["/v1/namespaces/{subsystem}/{nsid}"];
        for (verb, id) in [
            ("get", "namespace_by_key"),
            ("patch", "set_namespace_by_key"),
            ("delete", "delete_namespace"),
        ] {
            assert_eq!(item[verb]["operationId"], id);
            assert_eq!(item[verb]["parameters"][1]["name"], "nsid");
            assert_eq!(item[verb]["parameters"][1]["in"], "path");
        }
        assert_eq!(item["delete"]["parameters"][2]["in"], "query");
        let body = &item["patch"]["requestBody"]["content"]["application/json"]["schema"];
        assert!(body["properties"]["device"].is_object() && body["properties"]["nsid"].is_null());
        let list = &document["paths"]["/v1/namespaces"];
        assert_eq!(list["get"]["parameters"][0]["schema"]["type"], "array");
        assert!(list["post"]["responses"]["201"].is_object());
        assert_eq!(list["post"]["requestBody"]["required"], true);
    }

    /// The validator of PyPI, `pip install openapi-spec-validator`.
    #[test]
    fn document_of_the_program_is_accepted_by_a_validator() {
        let program = "import json, sys\n\
            from openapi_spec_validator import validate\n\
            validate(json.load(sys.stdin))";
        let probe = Command::new("python3").args(["-c", "import openapi_spec_validator"]).output();
        if !probe.is_ok_and(|probe| probe.status.success()) {
            println!("skipped: python3 has no openapi_spec_validator");
            return;
        }
        for table in [&RESOURCE, &crate::TABLE] {
            let document = openapi_document(&RouteTable::new(table)).to_string();
            let mut child = Command::new("python3")
                .args(["-c", program])
                .stdin(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(document.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
