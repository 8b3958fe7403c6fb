//! Paths of the HTTP API, derived from the table of methods.
//!
//! | method | request |
//! |---|---|
//! | get `NAME` | `GET /v1/NAME?PARAMETER=VALUE` |
//! | set `NAME` | `POST /v1/NAME`, parameters as a JSON object |
//! | create `NAME` | `POST /v1/NAMEs`, parameters as a JSON object |
//! | delete `NAME` | `DELETE /v1/NAMEs/KEY…` |
//! | set `NAME`, if `NAME` can be deleted | also `PATCH /v1/NAMEs/KEY…`, the other parameters as a JSON object |
//! | get `NAME`, if `NAME` can be deleted and its required parameters are the key | also `GET /v1/NAMEs/KEY…` |
//! | subscribe `NAME` | `GET /v1/NAME` |
//!
//! The key of an object are the required parameters of its delete method, each a segment of the path,
//! percent-encoded.

use serde_json::{Map, Value};

use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
use crate::percent_encoding::{decode, encode};
use crate::spelling_suggestion::nearest_name;

/// Routes of a table of methods.
#[derive(Clone, Debug)]
pub(crate) struct RouteTable {
    table: &'static MethodRegistry,
    routes: Vec<Route>,
}

/// Requests that call a method.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) verb: HttpVerb,
    /// First segment after `/v1/`.
    pub(crate) name: String,
    /// Parameters whose values are the further segments.
    pub(crate) key: Vec<&'static Parameter>,
    pub(crate) method: &'static Method,
}

/// HTTP method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HttpVerb {
    Get,
    Post,
    Patch,
    Delete,
}

/// Request target with the values that its path has.
#[derive(Debug)]
pub(crate) struct RouteMatch<'a> {
    pub(crate) route: &'a Route,
    /// Decoded segments of the key.
    pub(crate) key: Vec<String>,
}

/// Reason for rejecting a path.
#[derive(Debug)]
pub(crate) enum RouteError {
    /// No such path, or one that cannot be decoded.
    NotFound(RpcError),
    /// The path exists for these verbs.
    WrongVerb(Vec<HttpVerb>),
}

/// Request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EncodedRequest {
    pub(crate) verb: HttpVerb,
    /// Path and query.
    pub(crate) target: String,
    /// JSON object.
    pub(crate) body: Option<Vec<u8>>,
}

/// What all paths of methods begin with.
pub(crate) const PREFIX: &str = "/v1/";

impl HttpVerb {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }
}

impl Route {
    /// Path with the names of the key in braces, as OpenAPI has it.
    pub(crate) fn template(&self) -> String {
        let key: String =
            self.key.iter().map(|parameter| format!("/{{{}}}", parameter.name)).collect();
        format!("{PREFIX}{}{key}", self.name)
    }
}

impl RouteTable {
    /// Derives the routes of a table.
    pub(crate) fn new(table: &'static MethodRegistry) -> Self {
        let mut routes = Vec::new();
        for method in table.methods() {
            let mut add = |verb, name: String, key: &[&'static Parameter]| {
                routes.push(Route { verb, name, key: key.to_vec(), method });
            };
            let (name, names) = (method.name.to_owned(), format!("{}s", method.name));
            let key = resource_key(table, method.name);
            match method.verb {
                MethodKind::Get => {
                    add(HttpVerb::Get, name, &[]);
                    if let Some(key) = &key
                        && same_parameters(key, &required_parameters(method))
                    {
                        add(HttpVerb::Get, names, key);
                    }
                }
                MethodKind::Subscribe => add(HttpVerb::Get, name, &[]),
                MethodKind::Set => {
                    add(HttpVerb::Post, name, &[]);
                    if let Some(key) = &key
                        && key.iter().all(|one| has_parameter(method, one.name))
                    {
                        add(HttpVerb::Patch, names, key);
                    }
                }
                MethodKind::Create => add(HttpVerb::Post, names, &[]),
                MethodKind::Delete => {
                    add(HttpVerb::Delete, names, &key.unwrap_or_default());
                }
            }
        }
        Self { table, routes }
    }

    /// Table of the methods.
    pub(crate) fn table(&self) -> &'static MethodRegistry {
        self.table
    }

    /// All routes, in the order of the table.
    pub(crate) fn routes(&self) -> &[Route] {
        &self.routes
    }

    /// Finds the method that a request calls. `HEAD` is answered like `GET`, without the content.
    pub(crate) fn find(&self, verb: &str, path: &str) -> Result<RouteMatch<'_>, RouteError> {
        let unknown = || RouteError::NotFound(self.unknown_path_error(path));
        let rest = path.strip_prefix(PREFIX).ok_or_else(unknown)?;
        let segments: Option<Vec<String>> = rest.split('/').map(|one| decode(one, false)).collect();
        let mut segments = segments.ok_or_else(|| {
            let text = format!(
                "request: path {} is not percent-encoded UTF-8, expected such a path",
                quote_untrusted(path)
            );
            RouteError::NotFound(RpcError::usage(ErrorCode::NotARequest, text))
        })?;
        let name = segments.remove(0);
        let fits = |route: &&Route| route.name == name && route.key.len() == segments.len();
        let of_path = || self.routes.iter().filter(fits);
        let wanted = if verb == "HEAD" { HttpVerb::Get.name() } else { verb };
        match of_path().find(|route| route.verb.name() == wanted) {
            Some(route) => Ok(RouteMatch { route, key: segments }),
            None if of_path().next().is_none() => Err(unknown()),
            None => {
                let mut verbs: Vec<_> = of_path().map(|route| route.verb).collect();
                verbs.sort_unstable();
                verbs.dedup();
                Err(RouteError::WrongVerb(verbs))
            }
        }
    }

    fn unknown_path_error(&self, path: &str) -> RpcError {
        let shown = quote_untrusted(path);
        let name = path.strip_prefix(PREFIX).map(|rest| rest.split('/').next().unwrap_or(rest));
        let of_name = self.routes.iter().filter(|route| Some(route.name.as_str()) == name);
        let mut templates: Vec<_> = of_name.map(Route::template).collect();
        templates.sort_unstable();
        templates.dedup();
        let templates: Vec<&str> = templates.iter().map(String::as_str).collect();
        if !templates.is_empty() {
            let expected = join_alternatives(&templates);
            let text = format!("no path {shown}, expected {expected}");
            return RpcError::usage(ErrorCode::NoSuchMethod, text);
        }
        let text = format!("no path {shown}, expected one of those in /v1/openapi.json");
        let refusal = RpcError::usage(ErrorCode::NoSuchMethod, text);
        let known = self.routes.iter().map(|route| route.name.as_str());
        match name.and_then(|name| nearest_name(name, known)) {
            Some(near) => refusal.with_hint(format!("did you mean `{PREFIX}{near}`?")),
            None => refusal,
        }
    }

    /// Encodes a call of a method.
    pub(crate) fn encode(
        &self,
        method: &'static Method,
        mut parameters: Map<String, Value>,
    ) -> Result<EncodedRequest, RpcError> {
        let of_method = || self.routes.iter().filter(|route| std::ptr::eq(route.method, method));
        let is_complete = |route: &&Route| {
            route.key.iter().all(|one| parameters.get(one.name).is_some_and(is_scalar))
        };
        // The route with the longest key that the parameters have.
        let route = of_method().filter(is_complete).max_by_key(|route| route.key.len());
        let route = route.ok_or_else(|| {
            let names = of_method().flat_map(|route| &route.key).map(|one| one.name);
            let expected = names.collect::<Vec<_>>().join(" and ");
            let text = format!("{}: {expected} missing, expected it", method.command_line_name());
            RpcError::usage(ErrorCode::MissingParameter, text)
        })?;
        let mut target = format!("{PREFIX}{}", route.name);
        for parameter in &route.key {
            if let Some(value) = parameters.remove(parameter.name) {
                target.push('/');
                target += &encode(&scalar_text(&value));
            }
        }
        let verb = route.verb;
        let body = match verb {
            HttpVerb::Post | HttpVerb::Patch => Some(Value::from(parameters).to_string()),
            HttpVerb::Get | HttpVerb::Delete => {
                append_query(&mut target, &parameters);
                None
            }
        };
        Ok(EncodedRequest { verb, target, body: body.map(String::into_bytes) })
    }
}

/// Parameters that name an object, if there is a method that deletes it.
fn resource_key(table: &MethodRegistry, name: &str) -> Option<Vec<&'static Parameter>> {
    let is_delete =
        |method: &&'static Method| method.verb == MethodKind::Delete && method.name == name;
    table.methods().find(is_delete).map(required_parameters)
}

fn required_parameters(method: &'static Method) -> Vec<&'static Parameter> {
    let required = method.parameters.iter().filter(|one| one.need == ParamDefault::Required);
    required.collect()
}

fn same_parameters(some: &[&Parameter], others: &[&Parameter]) -> bool {
    some.len() == others.len()
        && some.iter().all(|one| others.iter().any(|other| other.name == one.name))
}

fn has_parameter(method: &Method, name: &str) -> bool {
    method.parameters.iter().any(|one| one.name == name)
}

fn is_scalar(value: &Value) -> bool {
    value.is_string() || value.is_number() || value.is_boolean()
}

fn scalar_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A list becomes a repeated parameter.
fn append_query(target: &mut String, parameters: &Map<String, Value>) {
    let mut separator = '?';
    for (name, value) in parameters {
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        for value in values {
            target.push(separator);
            *target += &format!("{}={}", encode(name), encode(&scalar_text(value)));
            separator = '&';
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::{HttpVerb, RouteError, RouteTable};
    use crate::error::ErrorCode;
    use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
    use crate::param_type::ParamType;
    use crate::result_type::ResultType;

    const fn parameter(name: &'static str, kind: ParamType, need: ParamDefault) -> Parameter {
        Parameter { name, kind, need, help: "a parameter" }
    }

    const fn row(
        verb: MethodKind,
        name: &'static str,
        parameters: &'static [Parameter],
        run: fn(&crate::CallContext<'_>) -> Result<Value, crate::RpcError>,
    ) -> Method {
        let answer = ResultType::Object;
        Method { verb, name, parameters, answer, help: "Do it", example: "tenmil do", run }
    }

    const TEXT: ParamType = ParamType::Text { len_max: 64 };
    const SUBSYSTEM: Parameter = parameter("subsystem", TEXT, ParamDefault::Required);
    const NSID: Parameter =
        parameter("nsid", ParamType::Whole { min: 1, max: 9 }, ParamDefault::Required);
    const DEVICE: Parameter = parameter("device", TEXT, ParamDefault::Optional);
    const FORCE: Parameter = parameter("force", ParamType::Flag, ParamDefault::Optional);
    const TAGS: Parameter =
        parameter("tag", ParamType::Texts { len_max: 8, count_max: 4 }, ParamDefault::Optional);

    /// Echoes the name of the method and its arguments.
    fn echo(call: &crate::CallContext<'_>) -> Result<Value, crate::RpcError> {
        let arguments = call.arguments;
        Ok(json!({
            "subsystem": arguments.text("subsystem"),
            "nsid": arguments.integer("nsid"),
            "device": arguments.text("device"),
            "force": arguments.boolean("force"),
            "tag": arguments.texts("tag"),
        }))
    }

    /// A resource with two parameters as its key.
    pub(crate) static RESOURCE: MethodRegistry = MethodRegistry::new(
        &[&[
            row(MethodKind::Get, "namespaces", &[TAGS], echo),
            row(MethodKind::Get, "namespace", &[SUBSYSTEM, NSID], echo),
            row(MethodKind::Set, "namespace", &[SUBSYSTEM, NSID, DEVICE], echo),
            row(MethodKind::Create, "namespace", &[SUBSYSTEM, NSID, DEVICE], echo),
            row(MethodKind::Delete, "namespace", &[SUBSYSTEM, NSID, FORCE], echo),
            row(MethodKind::Set, "mode", &[DEVICE], echo),
        ]],
        &[],
    );

    #[test]
    fn paths_of_a_resource_follow_from_its_delete_method() {
        let routes = RouteTable::new(&RESOURCE);
        let shown: Vec<String> = routes
            .routes()
            .iter()
            .map(|route| {
                let (verb, path) = (route.verb.name(), route.template());
                format!("{verb} {path} {}", route.method.request_name())
            })
            .collect();
        assert_eq!(
            shown,
            [
                "GET /v1/namespaces namespaces",
                "GET /v1/namespace namespace",
                "GET /v1/namespaces/{subsystem}/{nsid} namespace",
                "POST /v1/namespace set_namespace",
                "PATCH /v1/namespaces/{subsystem}/{nsid} set_namespace",
                "POST /v1/namespaces create_namespace",
                "DELETE /v1/namespaces/{subsystem}/{nsid} delete_namespace",
                "POST /v1/mode set_mode",
            ]
        );
        let found = routes.find("DELETE", "/v1/namespaces/nqn.2026%3Aa%2Fb/3").unwrap();
        assert_eq!(found.route.method.request_name(), "delete_namespace");
        assert_eq!(found.key, ["nqn.2026:a/b", "3"]);
        assert_eq!(routes.find("HEAD", "/v1/namespaces").unwrap().route.verb, HttpVerb::Get);
    }

    #[test]
    fn unknown_path_is_rejected_with_the_nearest_and_wrong_verb_with_the_allowed_ones() {
        let routes = RouteTable::new(&RESOURCE);
        let not_found = |path: &str| match routes.find("GET", path) {
            Err(RouteError::NotFound(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        let refusal = not_found("/v1/namespacs");
        assert_eq!(refusal.code, ErrorCode::NoSuchMethod);
        assert_eq!(refusal.hint.as_deref(), Some("did you mean `/v1/namespaces`?"));
        let refusal = not_found("/v1/namespaces/a");
        assert_eq!(
            refusal.message,
            "no path `/v1/namespaces/a`, expected /v1/namespaces or \
             /v1/namespaces/{subsystem}/{nsid}"
        );
        assert_eq!(not_found("/v1/namespaces/%ff/1").code, ErrorCode::NotARequest);
        for path in ["", "/", "/v2/x", "/v1", "/v1/", "namespaces", "/v1//namespaces"] {
            assert_eq!(not_found(path).code, ErrorCode::NoSuchMethod, "{path}");
        }
        for (verb, path, expected) in [
            ("PUT", "/v1/namespaces", vec![HttpVerb::Get, HttpVerb::Post]),
            ("POST", "/v1/namespaces/a/1", vec![HttpVerb::Get, HttpVerb::Patch, HttpVerb::Delete]),
            ("GET", "/v1/mode", vec![HttpVerb::Post]),
            ("get", "/v1/mode", vec![HttpVerb::Post]),
        ] {
            let Err(RouteError::WrongVerb(verbs)) = routes.find(verb, path) else {
                panic!("{verb} {path}")
            };
            assert_eq!(verbs, expected, "{verb} {path}");
        }
    }

    #[test]
    fn call_is_encoded_as_the_request_with_the_longest_key() {
        let routes = RouteTable::new(&RESOURCE);
        let encoded = |method: &str, parameters: Value| {
            let method = RESOURCE.find(method).unwrap();
            let request = routes.encode(method, parameters.as_object().unwrap().clone())?;
            let body = request.body.map(|body| String::from_utf8(body).unwrap());
            let body = body.unwrap_or_default();
            Ok::<_, crate::RpcError>(format!("{} {} {body}", request.verb.name(), request.target))
        };
        for (method, parameters, expected) in [
            (
                "namespaces",
                json!({ "tag": ["a b", "c&d"] }),
                "GET /v1/namespaces?tag=a%20b&tag=c%26d ",
            ),
            (
                "namespace",
                json!({ "subsystem": "nqn:a/b", "nsid": 1 }),
                "GET /v1/namespaces/nqn%3Aa%2Fb/1 ",
            ),
            (
                "set_namespace",
                json!({ "subsystem": "s", "nsid": 1, "device": "ram:1g" }),
                r#"PATCH /v1/namespaces/s/1 {"device":"ram:1g"}"#,
            ),
            (
                "set_namespace",
                json!({ "device": "ram:1g" }),
                r#"POST /v1/namespace {"device":"ram:1g"}"#,
            ),
            (
                "create_namespace",
                json!({ "subsystem": "s" }),
                r#"POST /v1/namespaces {"subsystem":"s"}"#,
            ),
            (
                "delete_namespace",
                json!({ "subsystem": "s", "nsid": 1, "force": true }),
                "DELETE /v1/namespaces/s/1?force=true ",
            ),
        ] {
            assert_eq!(encoded(method, parameters).unwrap(), expected);
        }
        let refusal = encoded("delete_namespace", json!({ "nsid": 1 })).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::MissingParameter, "{refusal}");
    }

    #[test]
    fn no_two_methods_of_the_program_have_the_same_request() {
        let routes = RouteTable::new(&crate::TABLE);
        let of = |route: &super::Route| (route.verb, route.name.clone(), route.key.len());
        let mut all: Vec<_> = routes.routes().iter().map(of).collect();
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
