//! HTTP API without I/O: the parts of a request in, a response out.
//!
//! Paths of methods follow from the table ([`RouteTable`]). Besides them there are:
//!
//! | path | response |
//! |---|---|
//! | `/v1/openapi.json` | description of the API |
//! | `/healthz` | the process answers |
//! | `/readyz` | the process serves; 503 while it starts or ends |
//! | `/metrics` | counters, in OpenMetrics or the text format of Prometheus, by `Accept` |
//! | `/`, and files below it | web page |

use serde_json::{Map, Value, json};
use tenmil_keyring::contains_key_text;

use crate::arguments::{Arguments, invalid_argument};
use crate::deferred_reply::{DeferredReplySlot, PendingReply};
use crate::error::{ErrorCode, RpcError, quote_untrusted};
use crate::event::{Event, SET};
use crate::method::{CallContext, Method, MethodKind, MethodRegistry, Parameter};
use crate::metrics::{OPEN_METRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE, prefers_open_metrics, render};
use crate::openapi::openapi_document;
use crate::page_files::PAGE_FILES;
use crate::param_type::{ParamType, value_text};
use crate::passed_fd::PassedFd;
use crate::percent_encoding::decode;
use crate::process_parts::ProcessParts;
use crate::readiness::Readiness;
use crate::route::{EncodedRequest, HttpVerb, RouteError, RouteMatch, RouteTable};
use crate::spelling_suggestion::nearest_name;
use crate::strict_json;

/// The API of a process.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    routes: RouteTable,
    state: ProcessParts,
}

/// Request of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ApiRequest<'a> {
    /// HTTP method.
    pub(crate) verb: &'a str,
    pub(crate) path: &'a str,
    pub(crate) query: &'a str,
    /// Media types that the client accepts.
    pub(crate) accept: &'a str,
    pub(crate) body: &'a [u8],
    /// Description of the client, for events.
    pub(crate) client: &'a str,
    /// File descriptor that came with the connection's requests.
    pub(crate) passed: &'a PassedFd,
}

/// Result of a request.
#[derive(Debug)]
pub(crate) enum ApiReply {
    Now(ApiResponse),
    /// The response is deferred.
    Later(DeferredResponse),
    /// A stream of events of these kinds, or of all if there are none.
    Events(Vec<String>),
}

/// Response.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiResponse {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) body: Vec<u8>,
    /// Other headers.
    pub(crate) headers: Vec<(&'static str, String)>,
    /// Event to emit: the request changed something.
    pub(crate) changed: Option<Event>,
}

/// Response that is deferred.
#[derive(Debug)]
pub(crate) struct DeferredResponse {
    pub(crate) pending: PendingReply,
    method: &'static Method,
    /// Event to emit if it succeeds.
    changed: Option<Event>,
}

pub(crate) const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const OPENAPI_PATH: &str = "/v1/openapi.json";
const FIXED_PATHS: [&str; 4] = [OPENAPI_PATH, "/healthz", "/readyz", "/metrics"];

impl Api {
    pub(crate) fn new(table: &'static MethodRegistry, state: ProcessParts) -> Self {
        Self { routes: RouteTable::new(table), state }
    }

    /// State that methods read.
    #[cfg(feature = "otlp")]
    pub(crate) fn parts(&self) -> &ProcessParts {
        &self.state
    }

    /// Whether a request of this kind may change something.
    pub(crate) fn is_change(verb: &str) -> bool {
        !matches!(verb, "GET" | "HEAD")
    }

    /// Whether this path is answered without a token: files of the page and the state of the process,
    /// which tell nothing about what it serves.
    pub(crate) fn is_public(path: &str) -> bool {
        matches!(path, "/healthz" | "/readyz") || PAGE_FILES.iter().any(|file| file.path == path)
    }

    /// Answers a request.
    pub(crate) fn answer(&self, request: ApiRequest<'_>) -> ApiReply {
        match self.fixed_response(request) {
            Some(response) => ApiReply::Now(response),
            None => self.call_method(request).unwrap_or_else(|response| ApiReply::Now(*response)),
        }
    }

    /// Response to a request for a path that is not of a method.
    fn fixed_response(&self, request: ApiRequest<'_>) -> Option<ApiResponse> {
        let path = request.path;
        let file = PAGE_FILES.iter().find(|file| file.path == path);
        if file.is_none() && !FIXED_PATHS.contains(&path) {
            return None;
        }
        if Self::is_change(request.verb) {
            return Some(wrong_verb_response(request, "GET, HEAD"));
        }
        if let Some(file) = file {
            return Some(ApiResponse::new(200, file.content_type, file.content.to_vec()));
        }
        Some(match path {
            OPENAPI_PATH => ApiResponse::json(200, &openapi_document(&self.routes)),
            "/healthz" => ApiResponse::new(200, TEXT, b"ok\n".to_vec()),
            "/metrics" => self.metrics_response(request.accept),
            _ => self.readiness_response(),
        })
    }

    fn metrics_response(&self, accept: &str) -> ApiResponse {
        let is_open = prefers_open_metrics(accept);
        let content_type = if is_open { OPEN_METRICS_CONTENT_TYPE } else { TEXT_CONTENT_TYPE };
        ApiResponse::new(200, content_type, render(&self.state, is_open).into_bytes())
    }

    fn readiness_response(&self) -> ApiResponse {
        // A process without a readiness serves from the start.
        let state = self.state.find_part::<Readiness>("readiness");
        let state = state.map_or("serving", Readiness::state_text);
        let status = if state == "serving" { 200 } else { 503 };
        ApiResponse::new(status, TEXT, format!("{state}\n").into_bytes())
    }

    /// Calls the method of the request. The error is a response too.
    fn call_method(&self, request: ApiRequest<'_>) -> Result<ApiReply, Box<ApiResponse>> {
        let refused = |refusal| Box::new(ApiResponse::error(&refusal));
        check_no_key_text(request).map_err(refused)?;
        let found = self.routes.find(request.verb, request.path).map_err(|error| match error {
            RouteError::NotFound(refusal) => refused(refusal),
            RouteError::WrongVerb(verbs) => {
                let mut allowed: Vec<&str> = verbs.iter().map(|verb| verb.name()).collect();
                if allowed.contains(&HttpVerb::Get.name()) {
                    allowed.push("HEAD");
                }
                Box::new(wrong_verb_response(request, &allowed.join(", ")))
            }
        })?;
        let method = found.route.method;
        let parameters =
            request_parameters(&found, request.query, request.body).map_err(refused)?;
        let arguments = Arguments::validate(method, &parameters).map_err(refused)?;
        let later = DeferredReplySlot::for_client(request.client);
        let (table, state, passed) = (self.routes.table(), &self.state, request.passed);
        let call = CallContext { table, state, arguments: &arguments, later: &later, passed };
        let answer = (method.run)(&call).map_err(refused)?;
        let changed =
            method.verb.is_change().then(|| method_called_event(request, method, &parameters));
        if let Some(pending) = later.take_pending() {
            return Ok(ApiReply::Later(DeferredResponse { pending, method, changed }));
        }
        check_result_type(method, &answer);
        if method.verb == MethodKind::Subscribe {
            if request.verb == "HEAD" {
                return Err(Box::new(wrong_verb_response(request, "GET")));
            }
            let kinds = arguments.texts("kind").to_vec();
            self.check_event_kinds(&kinds).map_err(refused)?;
            return Ok(ApiReply::Events(kinds));
        }
        Ok(ApiReply::Now(ApiResponse::of_method(method, &answer, changed)))
    }

    fn check_event_kinds(&self, kinds: &[String]) -> Result<(), RpcError> {
        let known = || self.routes.table().events().map(|kind| kind.name);
        let Some(unknown) = kinds.iter().find(|kind| !known().any(|known| known == kind.as_str()))
        else {
            return Ok(());
        };
        let text = format!(
            "events: kind is {}, expected one that `tenmil get --markdown` lists",
            quote_untrusted(unknown)
        );
        let refusal = RpcError::usage(ErrorCode::BadValue, text);
        Err(match nearest_name(unknown, known()) {
            Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
            None => refusal,
        })
    }
}

impl DeferredResponse {
    /// Response for the result, now that it is available.
    pub(crate) fn finish(self, result: Result<Value, RpcError>) -> ApiResponse {
        match result {
            Ok(answer) => {
                check_result_type(self.method, &answer);
                ApiResponse::of_method(self.method, &answer, self.changed)
            }
            Err(refusal) => ApiResponse::error(&refusal),
        }
    }
}

impl ApiResponse {
    fn new(status: u16, content_type: &'static str, body: Vec<u8>) -> Self {
        Self { status, content_type, body, headers: Vec::new(), changed: None }
    }

    fn json(status: u16, value: &Value) -> Self {
        // A line break, for terminals.
        Self::new(status, JSON, format!("{value}\n").into_bytes())
    }

    fn of_method(method: &Method, answer: &Value, changed: Option<Event>) -> Self {
        let status = if method.verb == MethodKind::Create { 201 } else { 200 };
        Self { changed, ..Self::json(status, answer) }
    }

    /// Response for an error.
    pub(crate) fn error(refusal: &RpcError) -> Self {
        let mut response =
            Self::json(refusal.http_status(), &json!({ "error": refusal.to_json() }));
        match refusal.code {
            ErrorCode::NoToken => {
                response.headers.push(("www-authenticate", "Bearer".into()));
            }
            ErrorCode::Busy => response.headers.push(("retry-after", "1".into())),
            // The rest of the request is not read.
            ErrorCode::TooLarge | ErrorCode::Timeout => {
                response.headers.push(("connection", "close".into()));
            }
            _ => {}
        }
        response
    }
}

/// A request that holds a key is rejected before anything repeats its text, for example in an error, an
/// event or the log.
fn check_no_key_text(request: ApiRequest<'_>) -> Result<(), RpcError> {
    let holds_key = |text: &str| {
        contains_key_text(text) || decode(text, true).is_some_and(|text| contains_key_text(&text))
    };
    let body = String::from_utf8_lossy(request.body);
    if holds_key(request.path) || holds_key(request.query) || contains_key_text(&body) {
        let text = "request: it holds a key, expected the name of one in a keyring";
        return Err(RpcError::usage(ErrorCode::BadValue, text));
    }
    Ok(())
}

/// Arguments of an encoded request, for the fuzzer.
pub(crate) fn request_arguments(
    found: &RouteMatch<'_>,
    request: &EncodedRequest,
) -> Result<Arguments, RpcError> {
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    let body = request.body.as_deref().unwrap_or_default();
    Arguments::validate(found.route.method, &request_parameters(found, query, body)?)
}

/// Parameters of a request: those in its path, its query and its body, each once.
fn request_parameters(
    found: &RouteMatch<'_>,
    query: &str,
    body: &[u8],
) -> Result<Map<String, Value>, RpcError> {
    let method = found.route.method;
    let mut parameters = query_parameters(method, query)?;
    for (name, value) in body_parameters(found.route.verb, body)? {
        if parameters.contains_key(&name) {
            return Err(given_twice_error(method, &name));
        }
        parameters.insert(name, value);
    }
    for (parameter, text) in found.route.key.iter().zip(&found.key) {
        let value = parse_text(method, parameter, text)?;
        if parameters.insert(parameter.name.to_owned(), value).is_some() {
            return Err(given_twice_error(method, parameter.name));
        }
    }
    Ok(parameters)
}

/// Parameters in a query: `name=value&name=value`.
fn query_parameters(method: &Method, query: &str) -> Result<Map<String, Value>, RpcError> {
    let mut parameters = Map::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, text) = pair.split_once('=').unwrap_or((pair, ""));
        let (Some(name), Some(text)) = (decode(name, true), decode(text, true)) else {
            let text = format!(
                "request: query {} is not percent-encoded UTF-8, expected such a query",
                quote_untrusted(pair)
            );
            return Err(RpcError::usage(ErrorCode::NotARequest, text));
        };
        let parameter = method.parameter(&name)?;
        let value = parse_text(method, parameter, &text)?;
        if let ParamType::Texts { .. } = parameter.kind {
            let list = parameters.entry(name).or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(list) = list {
                list.push(value);
            }
        } else if parameters.insert(name, value).is_some() {
            return Err(given_twice_error(method, parameter.name));
        }
    }
    Ok(parameters)
}

fn body_parameters(verb: HttpVerb, body: &[u8]) -> Result<Map<String, Value>, RpcError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(Map::new());
    }
    if verb == HttpVerb::Get {
        let text = "request: it has a body, expected parameters in the query";
        return Err(RpcError::usage(ErrorCode::NotARequest, text));
    }
    let value = strict_json::parse_json(body).map_err(|error| {
        let text = format!("request: body: {error}, expected one JSON object");
        RpcError::usage(ErrorCode::NotJson, text)
    })?;
    match value {
        Value::Object(parameters) => Ok(parameters),
        other => {
            let found = value_text(&other);
            let text = format!("request: body is {found}, expected an object with the parameters");
            Err(RpcError::usage(ErrorCode::NotARequest, text))
        }
    }
}

fn parse_text(method: &Method, parameter: &Parameter, text: &str) -> Result<Value, RpcError> {
    parameter.kind.parse_text(text).map_err(|why| invalid_argument(method, parameter, &why))
}

fn given_twice_error(method: &Method, name: &str) -> RpcError {
    let text = format!(
        "{}: {} is given twice, expected once",
        method.command_line_name(),
        quote_untrusted(name)
    );
    RpcError::usage(ErrorCode::BadValue, text)
}

fn wrong_verb_response(request: ApiRequest<'_>, allowed: &str) -> ApiResponse {
    let (verb, path) = (quote_untrusted(request.verb), quote_untrusted(request.path));
    let text = format!("no request {verb} for {path}, expected {allowed}");
    let mut response = ApiResponse::error(&RpcError::usage(ErrorCode::WrongVerb, text));
    response.headers.push(("allow", allowed.to_owned()));
    response
}

fn method_called_event(
    request: ApiRequest<'_>,
    method: &Method,
    parameters: &Map<String, Value>,
) -> Event {
    let (client, method) = (request.client, method.request_name());
    let parameters = Value::from(parameters.clone());
    Event {
        kind: SET,
        text: format!("{client} called {method} with {parameters}"),
        about: json!({ "client": client, "method": method, "parameters": parameters }),
    }
}

fn check_result_type(method: &Method, answer: &Value) {
    debug_assert_eq!(method.answer.check_value(answer), Ok(()), "{}", method.command_line_name());
}

#[cfg(test)]
mod tests;
