//! Errors of requests, in a form that programs can act on.

use core::fmt;

use serde_json::{Value, json};
use tenmil_base::ErrorCategory;

/// Error object of a response. Programs evaluate `code` and `category`; the text is for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcError {
    /// Stable code of the error.
    pub code: ErrorCode,
    /// Category: usage, environment or remote.
    pub category: ErrorCategory,
    /// What was found and what was expected, on one line.
    pub message: String,
    /// Next step to take, if known.
    pub hint: Option<String>,
}

/// Error code. Codes never change their meaning; new ones may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// The body is not JSON.
    NotJson,
    /// The request is malformed.
    NotARequest,
    /// No method has this name or path.
    NoSuchMethod,
    /// The path exists, but not with this HTTP method.
    WrongVerb,
    /// The media type of the body is not JSON.
    WrongMediaType,
    /// The method has no parameter of this name.
    NoSuchParameter,
    /// A required parameter is missing.
    MissingParameter,
    /// The value of a parameter is invalid.
    BadValue,
    /// The object of the method does not exist in this process.
    NotFound,
    /// The operation failed.
    Failed,
    /// The body exceeds the length limit.
    TooLarge,
    /// A request was not completed in time, or a response did not arrive in time.
    Timeout,
    /// The connection limit is reached.
    Busy,
    /// The request has no token, or a wrong one.
    NoToken,
    /// The user or the origin has no permission.
    NotAllowed,
    /// No process can be reached, or there are several and none was selected.
    NoProcess,
    /// The peer closed the connection.
    ConnectionClosed,
    /// Code of a newer version.
    Unknown,
}

impl ErrorCode {
    /// All codes with name, HTTP status and meaning.
    pub const ALL: [(Self, &'static str, u16, &'static str); 17] = [
        (
            Self::NotJson,
            "parse_error",
            400,
            "the body is not one JSON object, or a member is duplicated",
        ),
        (Self::NotARequest, "invalid_request", 400, "the request is malformed"),
        (Self::NoSuchMethod, "method_not_found", 404, "no method has this name or path"),
        (Self::WrongVerb, "wrong_verb", 405, "the path does not have this HTTP method"),
        (Self::WrongMediaType, "wrong_media_type", 415, "the body is not `application/json`"),
        (
            Self::NoSuchParameter,
            "unknown_parameter",
            400,
            "the method has no parameter with this name",
        ),
        (Self::MissingParameter, "missing_parameter", 400, "a required parameter is missing"),
        (Self::BadValue, "invalid_value", 400, "the value of a parameter is invalid"),
        (
            Self::NotFound,
            "not_found",
            404,
            "the object of the method does not exist in this process",
        ),
        (
            Self::Failed,
            "failed",
            409,
            "the operation failed; the status is 500 if the machine and 502 if a peer is the cause",
        ),
        (Self::TooLarge, "too_large", 413, "the body is too long; the connection is closed"),
        (
            Self::Timeout,
            "timeout",
            408,
            "a request was not completed in time; the connection is closed",
        ),
        (Self::Busy, "busy", 503, "a limit is reached; repeat the request later"),
        (Self::NoToken, "no_token", 401, "the request needs a token, or has a wrong one"),
        (Self::NotAllowed, "not_allowed", 403, "the user or the origin has no permission"),
        (
            Self::NoProcess,
            "no_process",
            503,
            "no process, or several, to connect to; reported by the client",
        ),
        (
            Self::ConnectionClosed,
            "connection_closed",
            503,
            "the process ends; or it closed the connection, reported by the client",
        ),
    ];

    /// Name of the code.
    pub fn name(self) -> &'static str {
        let row = Self::ALL.iter().find(|(code, ..)| *code == self);
        row.map_or("unknown", |(_, name, ..)| name)
    }

    /// Code with this name.
    pub fn from_name(name: &str) -> Self {
        let row = Self::ALL.iter().find(|(_, known, ..)| *known == name);
        row.map_or(Self::Unknown, |(code, ..)| *code)
    }
}

impl RpcError {
    /// Usage error: the caller requested something impossible.
    pub fn usage(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, category: ErrorCategory::Usage, message: message.into(), hint: None }
    }

    /// Environment error: the machine is not set up for the operation.
    pub fn environment(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, category: ErrorCategory::Environment, message: message.into(), hint: None }
    }

    /// Remote error: the peer violated the protocol or failed.
    pub fn remote(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, category: ErrorCategory::Remote, message: message.into(), hint: None }
    }

    /// Adds a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Status of the HTTP response that has this error.
    pub fn http_status(&self) -> u16 {
        match (self.code, self.category) {
            (ErrorCode::Failed, ErrorCategory::Environment) => 500,
            (ErrorCode::Failed, ErrorCategory::Remote) => 502,
            (code, _) => {
                let row = ErrorCode::ALL.iter().find(|(known, ..)| *known == code);
                row.map_or(500, |(_, _, status, _)| *status)
            }
        }
    }

    /// JSON value of the `"error"` member.
    pub fn to_json(&self) -> Value {
        let category = category_name(self.category);
        let mut error =
            json!({ "code": self.code.name(), "category": category, "message": self.message });
        if let Some(hint) = &self.hint {
            error["hint"] = hint.as_str().into();
        }
        error
    }

    /// Parses an `"error"` member. `None` if it is not an error object.
    pub fn from_json(error: &Value) -> Option<Self> {
        let text = |name| error.get(name).and_then(Value::as_str);
        let blames = [ErrorCategory::Usage, ErrorCategory::Environment, ErrorCategory::Remote];
        let category = blames
            .into_iter()
            .find(|category| Some(category_name(*category)) == text("category"))?;
        Some(Self {
            code: ErrorCode::from_name(text("code")?),
            category,
            message: text("message")?.to_owned(),
            hint: text("hint").map(str::to_owned),
        })
    }
}

fn category_name(category: ErrorCategory) -> &'static str {
    match category {
        ErrorCategory::Usage => "usage",
        ErrorCategory::Environment => "environment",
        ErrorCategory::Remote => "remote",
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl core::error::Error for RpcError {}

/// Formats untrusted text for a message: quoted, on one line, and truncated.
pub(crate) fn quote_untrusted(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    let mut shown: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}

/// Formats names as `a, b or c`.
pub(crate) fn join_alternatives(names: &[&str]) -> String {
    match names {
        [] => "none".into(),
        [name] => (*name).to_owned(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tenmil_base::ErrorCategory;

    use super::{ErrorCode, RpcError, join_alternatives, quote_untrusted};

    #[test]
    fn every_error_code_has_a_unique_name_that_parses_back() {
        for (code, name, status, meaning) in ErrorCode::ALL {
            assert_eq!((code.name(), ErrorCode::from_name(name)), (name, code));
            assert_eq!(RpcError::usage(code, "").http_status(), status);
            assert!(!meaning.is_empty());
        }
        assert_eq!(ErrorCode::from_name("of_a_later_version"), ErrorCode::Unknown);
    }

    #[test]
    fn error_survives_conversion_to_json_and_back() {
        let bare = RpcError::remote(ErrorCode::ConnectionClosed, "it went");
        assert_eq!(
            bare.to_json(),
            json!({"code": "connection_closed", "category": "remote", "message": "it went"})
        );
        for refusal in [bare.with_hint("come back"), RpcError::environment(ErrorCode::Failed, "no")]
        {
            assert_eq!(RpcError::from_json(&refusal.to_json()), Some(refusal));
        }
        let odd = json!({"code": "connection_closed", "category": "nobody", "message": ""});
        assert_eq!(RpcError::from_json(&odd), None);
        assert_eq!(RpcError::usage(ErrorCode::Busy, "").category, ErrorCategory::Usage);
        assert_eq!(RpcError::remote(ErrorCode::Failed, "").http_status(), 502);
    }

    #[test]
    fn untrusted_text_is_quoted_on_one_short_line() {
        assert_eq!(quote_untrusted("a\nb"), "`a\\nb`");
        assert_eq!(quote_untrusted(&"x".repeat(41)), format!("`{}…`", "x".repeat(40)));
        assert_eq!(join_alternatives(&["a"]), "a");
        assert_eq!(join_alternatives(&["a", "b", "c"]), "a, b or c");
    }
}
