//! The asking half of one connection: what comes back, cut into answers and events.

use std::collections::VecDeque;

use serde_json::Value;

use crate::json;
use crate::refusal::{Code, Refusal, quoted};

/// The asking half of one connection. Bytes in, replies out; what the serving side sent is checked
/// and not believed.
#[derive(Debug, Default)]
pub struct Replies {
    line: Vec<u8>,
    replies: VecDeque<Reply>,
}

/// Something that came back.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The answer to request `id`, or its refusal. Without an id it is about the connection.
    Answer {
        /// The request.
        id: Option<u64>,
        /// What it answers.
        result: Result<Value, Refusal>,
    },
    /// An event: an object.
    Event(Value),
}

/// No line of an honest server is longer.
const LINE_LEN_MAX: usize = 64 << 20;

impl Replies {
    /// Before anything came.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what came. After an error nothing that comes can be understood.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.line.extend_from_slice(&rest[..end]);
            let reply = read(&self.line)?;
            self.replies.push_back(reply);
            self.line.clear();
            rest = &rest[end + 1..];
        }
        self.line.extend_from_slice(rest);
        if self.line.len() > LINE_LEN_MAX {
            return Err(lie(&format!("a line of more than {LINE_LEN_MAX} bytes")));
        }
        Ok(())
    }

    /// The next reply, in the order in which they came.
    pub fn next_reply(&mut self) -> Option<Reply> {
        self.replies.pop_front()
    }
}

fn lie(found: &str) -> Refusal {
    let message = format!("answer: {found}, expected a line with answer, error or event");
    Refusal::peer(Code::NotJson, message)
}

fn read(line: &[u8]) -> Result<Reply, Refusal> {
    let shown = || quoted(&String::from_utf8_lossy(&line[..line.len().min(200)]));
    let Ok(Value::Object(mut members)) = json::parse(line) else { return Err(lie(&shown())) };
    let id = members.get("id").and_then(Value::as_u64);
    if let Some(answer) = members.remove("answer") {
        return Ok(Reply::Answer { id, result: Ok(answer) });
    }
    if let Some(refusal) = members.get("error").and_then(Refusal::from_json) {
        return Ok(Reply::Answer { id, result: Err(refusal) });
    }
    match members.remove("event") {
        Some(event) if event.is_object() => Ok(Reply::Event(event)),
        _ => Err(lie(&shown())),
    }
}

#[cfg(test)]
mod tests {
    use base::Blame;
    use serde_json::json;

    use super::{Replies, Reply};
    use crate::refusal::{Code, Refusal};

    const STREAM: &str = concat!(
        r#"{"id":1,"answer":{"a":1}}"#,
        "\n",
        r#"{"event":{"kind":"set"}}"#,
        "\n",
        r#"{"id":null,"error":{"code":"busy","blame":"caller","message":"no","hint":"wait"}}"#,
        "\n",
    );

    fn expected() -> [Reply; 3] {
        let refusal = Refusal::caller(Code::Busy, "no").with_hint("wait");
        [
            Reply::Answer { id: Some(1), result: Ok(json!({ "a": 1 })) },
            Reply::Event(json!({ "kind": "set" })),
            Reply::Answer { id: None, result: Err(refusal) },
        ]
    }

    #[test]
    fn a_stream_means_the_same_wherever_it_is_cut() {
        let bytes = STREAM.as_bytes();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let mut replies = Replies::new();
                for piece in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                    replies.receive(piece).unwrap();
                }
                let all: Vec<_> = std::iter::from_fn(|| replies.next_reply()).collect();
                assert_eq!(all, expected(), "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn what_is_no_reply_is_the_peers_doing() {
        for line in ["", "x", "[]", "{}", r#"{"event":1}"#, r#"{"id":1,"error":{}}"#, "\u{0}"] {
            let refusal = Replies::new().receive(format!("{line}\n").as_bytes()).unwrap_err();
            assert_eq!(refusal.blame, Blame::Peer, "{refusal}");
        }
        let endless = vec![b' '; super::LINE_LEN_MAX + 1];
        assert!(Replies::new().receive(&endless).is_err());
    }
}
