//! Parsing and dispatch of a request line.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::arguments::Arguments;
use crate::deferred::{DeferredReply, PendingReply};
use crate::did_you_mean::nearest;
use crate::error::{Code, RpcError, quoted};
use crate::json;
use crate::method::{CallContext, Method, MethodRegistry};
use crate::passed_fd::PassedFd;
use crate::state::ServerState;

/// Request: `{"id":1,"method":"reactors","parameters":{}}`.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Id that the response repeats.
    pub id: Id,
    /// Name of a method.
    pub method: String,
    /// Parameters.
    pub parameters: Map<String, Value>,
}

/// Id of a request: an integer or a short text chosen by the client; null in a response if it could
/// not be parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Id {
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
    pub(crate) id: Id,
    pub(crate) refusal: RpcError,
}

impl Request {
    /// Parses a line without its terminator.
    pub(crate) fn read(line: &[u8]) -> Result<Self, InvalidRequest> {
        let unread = |refusal| InvalidRequest { id: Id::None, refusal };
        let value = json::parse(line).map_err(|error| {
            let message = format!("request: {error}, expected one JSON object on a line");
            unread(RpcError::caller(Code::NotJson, message))
        })?;
        let Value::Object(mut members) = value else {
            return Err(unread(malformed("it is no object, expected one with id and method")));
        };
        let id = read_id(members.get("id")).map_err(unread)?;
        match read_rest(&mut members) {
            Ok((method, parameters)) => Ok(Self { id, method, parameters }),
            Err(refusal) => Err(InvalidRequest { id, refusal }),
        }
    }

    /// Dispatches the request to its method.
    pub(crate) fn dispatch(
        &self,
        table: &MethodRegistry,
        state: &ServerState,
        passed: &PassedFd,
    ) -> Result<(&'static Method, Dispatch), RpcError> {
        let method = table.find(&self.method)?;
        let arguments = Arguments::check(method, &self.parameters)?;
        let later = DeferredReply::default();
        let call = CallContext { table, state, arguments: &arguments, later: &later, passed };
        let answer = (method.run)(&call)?;
        if let Some(pending) = later.take() {
            return Ok((method, Dispatch::Later(pending)));
        }
        debug_assert_eq!(method.answer.check(&answer), Ok(()), "{}", method.typed_name());
        Ok((method, Dispatch::Now(answer)))
    }

    /// Line of the request.
    pub(crate) fn to_line(&self) -> Vec<u8> {
        #[derive(Serialize)]
        struct RawRequest<'a> {
            id: &'a Id,
            method: &'a str,
            parameters: &'a Map<String, Value>,
        }
        line(&RawRequest { id: &self.id, method: &self.method, parameters: &self.parameters })
    }
}

/// Result of a dispatched request.
#[derive(Debug)]
pub(crate) enum Dispatch {
    /// Result.
    Now(Value),
    /// Deferred result.
    Later(PendingReply),
}

/// Line of the response to request `id`.
pub(crate) fn response_line(id: &Id, result: &Result<Value, RpcError>) -> Vec<u8> {
    #[derive(Serialize)]
    struct RawResponse<'a> {
        id: &'a Id,
        answer: &'a Value,
    }
    #[derive(Serialize)]
    struct Error<'a> {
        id: &'a Id,
        error: Value,
    }
    match result {
        Ok(answer) => line(&RawResponse { id, answer }),
        Err(refusal) => line(&Error { id, error: refusal.to_json() }),
    }
}

/// Serializes JSON followed by a newline. The text of a value contains no newline.
fn line(value: &impl Serialize) -> Vec<u8> {
    // Serialization cannot fail: keys are strings, and the writer is memory.
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

fn malformed(why: &str) -> RpcError {
    RpcError::caller(Code::NotARequest, format!("request: {why}"))
        .with_hint(r#"for example `{"id":1,"method":"methods"}`"#)
}

fn read_id(id: Option<&Value>) -> Result<Id, RpcError> {
    match id {
        Some(Value::Number(number)) if number.is_u64() => {
            Ok(Id::Number(number.as_u64().unwrap_or_default()))
        }
        Some(Value::String(text)) if text.len() <= ID_LEN_MAX => Ok(Id::Text(text.clone())),
        found => {
            let found = found.map_or("missing".into(), crate::param_type::shown);
            let expected = format!("a whole number or a text of at most {ID_LEN_MAX} bytes");
            Err(malformed(&format!("id is {found}, expected {expected}")))
        }
    }
}

fn read_rest(members: &mut Map<String, Value>) -> Result<(String, Map<String, Value>), RpcError> {
    if let Some(name) = members.keys().find(|name| !MEMBERS.contains(&name.as_str())) {
        let shown = quoted(name);
        let refusal = malformed(&format!("no member {shown}, expected id, method and parameters"));
        return Err(match nearest(name, MEMBERS) {
            Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
            None => refusal,
        });
    }
    let method = match members.remove("method") {
        Some(Value::String(method)) => method,
        found => {
            let found = found.as_ref().map_or("missing".into(), crate::param_type::shown);
            return Err(malformed(&format!("method is {found}, expected the name of one")));
        }
    };
    match members.remove("parameters") {
        None => Ok((method, Map::new())),
        Some(Value::Object(parameters)) => Ok((method, parameters)),
        Some(found) => {
            let found = crate::param_type::shown(&found);
            Err(malformed(&format!("parameters is {found}, expected an object")))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Id, InvalidRequest, Request, response_line};
    use crate::error::{Code, RpcError};

    fn refused(line: &str) -> (Id, Code, String) {
        let InvalidRequest { id, refusal } = Request::read(line.as_bytes()).unwrap_err();
        (id, refusal.code, refusal.message)
    }

    #[test]
    fn a_request_is_read_as_it_is_written() {
        for id in [Id::Number(7), Id::Text("a\"b".into())] {
            let parameters = json!({ "a": { "b": 1 } }).as_object().unwrap().clone();
            let request = Request { id, method: "reactors".into(), parameters };
            let line = request.to_line();
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert_eq!(Request::read(&line), Ok(request));
        }
        let bare = Request::read(br#"{"id":1,"method":"x"}"#).unwrap();
        assert!(bare.parameters.is_empty());
    }

    #[test]
    fn what_is_no_request_is_refused_with_its_id_where_there_is_one() {
        let code = Code::NotARequest;
        for (line, id, message) in [
            ("[1]", Id::None, "request: it is no object, expected one with id and method"),
            (
                r#"{"method":"x"}"#,
                Id::None,
                "request: id is missing, expected a whole number or a text of at most 128 bytes",
            ),
            (
                r#"{"id":-1,"method":"x"}"#,
                Id::None,
                "request: id is -1, expected a whole number or a text of at most 128 bytes",
            ),
            (
                r#"{"id":1,"methods":"x"}"#,
                Id::Number(1),
                "request: no member `methods`, expected id, method and parameters",
            ),
            (
                r#"{"id":"me"}"#,
                Id::Text("me".into()),
                "request: method is missing, expected the name of one",
            ),
            (
                r#"{"id":2,"method":5}"#,
                Id::Number(2),
                "request: method is 5, expected the name of one",
            ),
            (
                r#"{"id":2,"method":"x","parameters":[]}"#,
                Id::Number(2),
                "request: parameters is a list, expected an object",
            ),
        ] {
            assert_eq!(refused(line), (id, code, message.into()), "{line}");
        }
        let (id, code, message) = refused(r#"{"id":1,"id":2,"method":"x"}"#);
        assert_eq!((id, code), (Id::None, Code::NotJson));
        assert!(message.contains("member `id` is there twice"), "{message}");
        let long = format!(r#"{{"id":"{}","method":"x"}}"#, "x".repeat(129));
        assert_eq!(refused(&long).1, Code::NotARequest);
        assert_eq!(refused("\u{0}").1, Code::NotJson);
    }

    #[test]
    fn an_answer_names_its_request_first() {
        let text = |id, result| String::from_utf8(response_line(&id, &result)).unwrap();
        assert_eq!(text(Id::Number(1), Ok(json!({"b": 1}))), "{\"id\":1,\"answer\":{\"b\":1}}\n");
        let refusal = RpcError::caller(Code::Busy, "later");
        assert_eq!(
            text(Id::None, Err(refusal)),
            "{\"id\":null,\"error\":{\"category\":\"usage\",\"code\":\"busy\",\"message\":\"later\"}}\n"
        );
    }
}
