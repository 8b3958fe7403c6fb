//! Client side of a connection: parses received lines into responses and events.

use std::collections::VecDeque;

use serde_json::Value;

use crate::error::{ErrorCode, RpcError, quote_untrusted};
use crate::strict_json;

/// Incremental parser of the client side. What the server sends is validated.
#[derive(Debug, Default)]
pub struct ReplyParser {
    line: Vec<u8>,
    replies: VecDeque<Reply>,
}

/// Received message.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Response to request `id`. Without an id it concerns the connection.
    Response {
        /// Id of the request.
        id: Option<u64>,
        /// Result or error.
        result: Result<Value, RpcError>,
    },
    /// Event object.
    Event(Value),
}

/// Longest line accepted from a server.
const LINE_LEN_MAX: usize = 64 << 20;

impl ReplyParser {
    /// Creates an empty parser.
    pub fn new() -> Self {
        Self::default()
    }

    /// Parses received bytes. After an error the stream cannot be parsed any further.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), RpcError> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.line.extend_from_slice(&rest[..end]);
            let reply = parse_reply(&self.line)?;
            self.replies.push_back(reply);
            self.line.clear();
            rest = &rest[end + 1..];
        }
        self.line.extend_from_slice(rest);
        if self.line.len() > LINE_LEN_MAX {
            return Err(malformed_error(&format!("a line of more than {LINE_LEN_MAX} bytes")));
        }
        Ok(())
    }

    /// Next message, in the order of arrival.
    pub fn next_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }
}

fn malformed_error(found: &str) -> RpcError {
    let message = format!("response: {found}, expected a line with answer, error or event");
    RpcError::remote(ErrorCode::NotJson, message)
}

fn parse_reply(line: &[u8]) -> Result<Reply, RpcError> {
    let shown = || quote_untrusted(&String::from_utf8_lossy(&line[..line.len().min(200)]));
    let Ok(Value::Object(mut members)) = strict_json::parse_json(line) else {
        return Err(malformed_error(&shown()));
    };
    let id = members.get("id").and_then(Value::as_u64);
    if let Some(answer) = members.remove("answer") {
        return Ok(Reply::Response { id, result: Ok(answer) });
    }
    if let Some(refusal) = members.get("error").and_then(RpcError::from_json) {
        return Ok(Reply::Response { id, result: Err(refusal) });
    }
    match members.remove("event") {
        Some(event) if event.is_object() => Ok(Reply::Event(event)),
        _ => Err(malformed_error(&shown())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tenmil_base::ErrorCategory;

    use super::{Reply, ReplyParser};
    use crate::error::{ErrorCode, RpcError};

    const STREAM: &str = concat!(
        r#"{"id":1,"answer":{"a":1}}"#,
        "\n",
        r#"{"event":{"kind":"set"}}"#,
        "\n",
        r#"{"id":null,"error":{"code":"busy","category":"usage","message":"no","hint":"wait"}}"#,
        "\n",
    );

    fn sample_replies() -> [Reply; 3] {
        let refusal = RpcError::usage(ErrorCode::Busy, "no").with_hint("wait");
        [
            Reply::Response { id: Some(1), result: Ok(json!({ "a": 1 })) },
            Reply::Event(json!({ "kind": "set" })),
            Reply::Response { id: None, result: Err(refusal) },
        ]
    }

    #[test]
    fn reply_stream_split_at_any_byte_gives_the_same_replies() {
        let bytes = STREAM.as_bytes();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let mut replies = ReplyParser::new();
                for piece in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                    replies.receive(piece).unwrap();
                }
                let all: Vec<_> = std::iter::from_fn(|| replies.next_reply()).collect();
                assert_eq!(all, sample_replies(), "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn malformed_reply_is_a_remote_error() {
        for line in ["", "x", "[]", "{}", r#"{"event":1}"#, r#"{"id":1,"error":{}}"#, "\u{0}"] {
            let refusal = ReplyParser::new().receive(format!("{line}\n").as_bytes()).unwrap_err();
            assert_eq!(refusal.category, ErrorCategory::Remote, "{refusal}");
        }
        let endless = vec![b' '; super::LINE_LEN_MAX + 1];
        assert!(ReplyParser::new().receive(&endless).is_err());
    }
}
