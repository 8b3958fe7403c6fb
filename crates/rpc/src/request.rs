//! Parsing and dispatch of a request line.

use serde::Serialize;
use serde_json::{Map, Value};
use tenmil_keyring::contains_key_text;

use crate::arguments::Arguments;
use crate::deferred_reply::{DeferredReplySlot, PendingReply};
use crate::error::{ErrorCode, RpcError, quote_untrusted};
use crate::method::{CallContext, Method, MethodRegistry};
use crate::passed_fd::PassedFd;
use crate::process_parts::ProcessParts;
use crate::spelling_suggestion::nearest_name;
use crate::strict_json;

/// Request: `{"id":1,"method":"reactors","parameters":{}}`.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Id that the response repeats.
    pub id: RequestId,
    /// Name of a method.
    pub method: String,
    /// Parameters.
    pub parameters: Map<String, Value>,
}

/// Id of a request: an integer or a short text chosen by the client; null in a response if it could
/// not be parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum RequestId {
    /// Not available.
    #[default]
    None,
    /// Number.
    Number(u64),
    /// Text.
    Text(String),
}

const ID_LEN_MAX: usize = 128;
const MEMBERS: [&str; 3] = ["id", "method", "parameters"];

/// Error for an invalid request, with its id if that could be parsed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct InvalidRequest {
    pub(crate) id: RequestId,
    pub(crate) refusal: RpcError,
}

impl Request {
    /// Parses a line without its terminator. One that holds a key is rejected before anything repeats
    /// its text, for example in an error, an event or the log.
    pub(crate) fn parse_line(line: &[u8]) -> Result<Self, InvalidRequest> {
        let unread = |refusal| InvalidRequest { id: RequestId::None, refusal };
        if contains_key_text(&String::from_utf8_lossy(line)) {
            let text = "request: it holds a key, expected the name of one in a keyring";
            return Err(unread(RpcError::usage(ErrorCode::BadValue, text.to_owned())));
        }
        let value = strict_json::parse_json(line).map_err(|error| {
            let message = format!("request: {error}, expected one JSON object on a line");
            unread(RpcError::usage(ErrorCode::NotJson, message))
        })?;
        let Value::Object(mut members) = value else {
            return Err(unread(malformed_error(
                "it is no object, expected one with id and method",
            )));
        };
        let id = parse_id(members.get("id")).map_err(unread)?;
        match parse_method_and_parameters(&mut members) {
            Ok((method, parameters)) => Ok(Self { id, method, parameters }),
            Err(refusal) => Err(InvalidRequest { id, refusal }),
        }
    }

    /// Dispatches the request to its method.
    pub(crate) fn dispatch(
        &self,
        table: &MethodRegistry,
        state: &ProcessParts,
        passed: &PassedFd,
    ) -> Result<(&'static Method, DispatchResult), RpcError> {
        let method = table.find(&self.method)?;
        let arguments = Arguments::validate(method, &self.parameters)?;
        let later = DeferredReplySlot::default();
        let call = CallContext { table, state, arguments: &arguments, later: &later, passed };
        let answer = (method.run)(&call)?;
        if let Some(pending) = later.take_pending() {
            return Ok((method, DispatchResult::Later(pending)));
        }
        debug_assert_eq!(
            method.answer.check_value(&answer),
            Ok(()),
            "{}",
            method.command_line_name()
        );
        Ok((method, DispatchResult::Now(answer)))
    }

    /// Line of the request.
    pub(crate) fn to_line(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct RawRequest<'a> {
            id: &'a RequestId,
            method: &'a str,
            parameters: &'a Map<String, Value>,
        }
        json_line(&RawRequest { id: &self.id, method: &self.method, parameters: &self.parameters })
    }
}

/// Result of a dispatched request.
#[derive(Debug)]
pub(crate) enum DispatchResult {
    /// Result.
    Now(Value),
    /// Deferred result.
    Later(PendingReply),
}

/// Line of the response to request `id`.
pub(crate) fn response_line(id: &RequestId, result: &Result<Value, RpcError>) -> Vec<u8> {
    #[derive(Serialize)]
    struct RawResponse<'a> {
        id: &'a RequestId,
        answer: &'a Value,
    }
    #[derive(Serialize)]
    struct Error<'a> {
        id: &'a RequestId,
        error: Value,
    }
    match result {
        Ok(answer) => json_line(&RawResponse { id, answer }),
        Err(refusal) => json_line(&Error { id, error: refusal.to_json() }),
    }
}

/// Serializes JSON followed by a newline. The text of a value contains no newline.
fn json_line(value: &impl Serialize) -> Vec<u8> {
    // Serialization cannot fail: keys are strings, and the writer is memory.
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

fn malformed_error(why: &str) -> RpcError {
    RpcError::usage(ErrorCode::NotARequest, format!("request: {why}"))
        .with_hint(r#"for example `{"id":1,"method":"methods"}`"#)
}

fn parse_id(id: Option<&Value>) -> Result<RequestId, RpcError> {
    match id {
        Some(Value::Number(number)) if number.is_u64() => {
            Ok(RequestId::Number(number.as_u64().unwrap_or_default()))
        }
        Some(Value::String(text)) if text.len() <= ID_LEN_MAX => Ok(RequestId::Text(text.clone())),
        found => {
            let found = found.map_or("missing".into(), crate::param_type::value_text);
            let expected = format!("a whole number or a text of at most {ID_LEN_MAX} bytes");
            Err(malformed_error(&format!("id is {found}, expected {expected}")))
        }
    }
}

fn parse_method_and_parameters(
    members: &mut Map<String, Value>,
) -> Result<(String, Map<String, Value>), RpcError> {
    if let Some(name) = members.keys().find(|name| !MEMBERS.contains(&name.as_str())) {
        let shown = quote_untrusted(name);
        let refusal =
            malformed_error(&format!("no member {shown}, expected id, method and parameters"));
        return Err(match nearest_name(name, MEMBERS) {
            Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
            None => refusal,
        });
    }
    let method = match members.remove("method") {
        Some(Value::String(method)) => method,
        found => {
            let found = found.as_ref().map_or("missing".into(), crate::param_type::value_text);
            return Err(malformed_error(&format!("method is {found}, expected the name of one")));
        }
    };
    match members.remove("parameters") {
        None => Ok((method, Map::new())),
        Some(Value::Object(parameters)) => Ok((method, parameters)),
        Some(found) => {
            let found = crate::param_type::value_text(&found);
            Err(malformed_error(&format!("parameters is {found}, expected an object")))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{InvalidRequest, Request, RequestId, response_line};
    use crate::error::{ErrorCode, RpcError};

    fn rejected_line(line: &str) -> (RequestId, ErrorCode, String) {
        let InvalidRequest { id, refusal } = Request::parse_line(line.as_bytes()).unwrap_err();
        (id, refusal.code, refusal.message)
    }

    #[test]
    fn request_line_is_parsed() {
        for id in [RequestId::Number(7), RequestId::Text("a\"b".into())] {
            let parameters = json!({ "a": { "b": 1 } }).as_object().unwrap().clone();
            let request = Request { id, method: "reactors".into(), parameters };
            let line = request.to_line();
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert_eq!(Request::parse_line(&line), Ok(request));
        }
        let bare = Request::parse_line(br#"{"id":1,"method":"x"}"#).unwrap();
        assert!(bare.parameters.is_empty());
    }

    #[test]
    fn request_that_holds_a_key_is_rejected_without_repeating_it() {
        let line = r#"{"id":1,"method":"DHHC-1:00:secret:","parameters":{}}"#;
        let (_, code, message) = rejected_line(line);
        assert_eq!(code, ErrorCode::BadValue);
        assert!(message.contains("holds a key") && !message.contains("secret"), "{message}");
    }

    #[test]
    fn malformed_request_is_rejected_with_its_id_if_known() {
        let code = ErrorCode::NotARequest;
        for (line, id, message) in [
            ("[1]", RequestId::None, "request: it is no object, expected one with id and method"),
            (
                r#"{"method":"x"}"#,
                RequestId::None,
                "request: id is missing, expected a whole number or a text of at most 128 bytes",
            ),
            (
                r#"{"id":-1,"method":"x"}"#,
                RequestId::None,
                "request: id is -1, expected a whole number or a text of at most 128 bytes",
            ),
            (
                r#"{"id":1,"methods":"x"}"#,
                RequestId::Number(1),
                "request: no member `methods`, expected id, method and parameters",
            ),
            (
                r#"{"id":"me"}"#,
                RequestId::Text("me".into()),
                "request: method is missing, expected the name of one",
            ),
            (
                r#"{"id":2,"method":5}"#,
                RequestId::Number(2),
                "request: method is 5, expected the name of one",
            ),
            (
                r#"{"id":2,"method":"x","parameters":[]}"#,
                RequestId::Number(2),
                "request: parameters is a list, expected an object",
            ),
        ] {
            assert_eq!(rejected_line(line), (id, code, message.into()), "{line}");
        }
        let (id, code, message) = rejected_line(r#"{"id":1,"id":2,"method":"x"}"#);
        assert_eq!((id, code), (RequestId::None, ErrorCode::NotJson));
        assert!(message.contains("member `id` is there twice"), "{message}");
        let long = format!(r#"{{"id":"{}","method":"x"}}"#, "x".repeat(129));
        assert_eq!(rejected_line(&long).1, ErrorCode::NotARequest);
        assert_eq!(rejected_line("\u{0}").1, ErrorCode::NotJson);
    }

    #[test]
    fn response_begins_with_the_request_id() {
        let text = |id, result| String::from_utf8(response_line(&id, &result)).unwrap();
        assert_eq!(
            text(RequestId::Number(1), Ok(json!({"b": 1}))),
            "{\"id\":1,\"answer\":{\"b\":1}}\n"
        );
        let refusal = RpcError::usage(ErrorCode::Busy, "later");
        assert_eq!(
            text(RequestId::None, Err(refusal)),
            "{\"id\":null,\"error\":{\"category\":\"usage\",\"code\":\"busy\",\"message\":\"later\"}}\n"
        );
    }
}
