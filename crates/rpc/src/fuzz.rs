//! Fuzzer: feeds arbitrary bytes to both sides of a connection and checks the invariants.

use serde_json::Value;
use tenmil_base::{Instant, Span};

use crate::methods::SAME_EVERYWHERE;
use crate::process_parts::ProcessParts;
use crate::reply_parser::ReplyParser;
use crate::request::Request;
use crate::session::{LineResult, ServerContext, Session, SessionLimits};
use crate::target_config::TargetConfig;

/// Small limits, so that short inputs reach them.
const LIMITS: SessionLimits = SessionLimits {
    line_len_max: 512,
    unsent_soft_max: 4096,
    unsent_max: 1 << 20,
    line_timeout: Span::from_secs(1),
    send_timeout: Span::from_secs(1),
    idle_timeout: Span::from_secs(100),
};

/// Feeds `bytes` to both sides of a connection.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_rpc_connection(bytes: &[u8]) {
    let whole = run_session(bytes, usize::MAX);
    // The responses must not depend on how the stream is fragmented.
    let cut = bytes.first().map_or(1, |first| usize::from(first % 7) + 1);
    assert_eq!(run_session(bytes, cut), whole, "cut every {cut} bytes");
    // The reply parser must accept arbitrary input, and own requests must be parsed.
    let _ = ReplyParser::new().receive(bytes);
    if let Ok(request) = Request::parse_line(bytes) {
        assert_eq!(Request::parse_line(&request.to_line()), Ok(request));
    }
    if let Ok(text) = core::str::from_utf8(bytes)
        && let Err(wrong) = TargetConfig::parse(text)
    {
        assert!((1..=text.lines().count() + 1).contains(&wrong.line), "{wrong}");
    }
}

/// Returns the responses of a session to `bytes`, fed in pieces of at most `cut`.
fn run_session(bytes: &[u8], cut: usize) -> Vec<u8> {
    // No parts: the state of a real process would not be reproducible.
    let state = ProcessParts::new();
    let served = ServerContext { table: &SAME_EVERYWHERE, state: &state };
    let now = Instant::default();
    let mut session = Session::new(now, "fuzz", LIMITS);
    let mut output = Vec::new();
    let mut rest = bytes;
    let mut turns = 0;
    loop {
        let piece = &rest[..rest.len().min(cut)];
        let taken = session.receive(now, piece);
        rest = &rest[taken..];
        let stepped = session.process_line(served) != LineResult::Nothing;
        output.extend_from_slice(session.unsent_bytes());
        session.record_sent(now, session.unsent_bytes().len());
        if session.close_reason().is_some() {
            break;
        }
        if rest.is_empty() && !stepped {
            session.handle_stream_end();
        }
        turns += 1;
        assert!(turns < 4 * bytes.len() + 16, "a session makes no progress");
    }
    check_output_lines(&output);
    output
}

/// Checks that every line of the output is a JSON object with a response or an error.
fn check_output_lines(output: &[u8]) {
    let text = core::str::from_utf8(output).expect("answers are UTF-8");
    assert!(text.is_empty() || text.ends_with('\n'), "answers are whole lines");
    for line in text.lines() {
        let value: Value = serde_json::from_str(line).expect("an answer is JSON");
        let answered = value.get("answer").is_some() != value.get("error").is_some();
        assert!(answered && value.get("id").is_some(), "{line}");
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{fuzz_rpc_connection, run_session};

    const LINES: [&str; 5] = [
        r#"{"id":1,"method":"methods"}"#,
        r#"{"id":"a","method":"process","parameters":{"x":1}}"#,
        r#"{"id":2,"method":"events","parameters":{}}"#,
        r#"{"id":3,"method":"metods"}"#,
        "[[[[[[",
    ];

    #[test]
    fn every_line_is_answered_once_and_in_order() {
        let text = String::from_utf8(run_session(LINES.join("\n").as_bytes(), 3)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), LINES.len());
        let begins = [
            r#"{"id":1,"a"#,
            r#"{"id":"a","e"#,
            r#"{"id":2,"a"#,
            r#"{"id":3,"e"#,
            r#"{"id":null,"e"#,
        ];
        for (line, begin) in lines.iter().zip(begins) {
            assert!(line.starts_with(begin), "{line}");
        }
    }

    #[test]
    fn random_bytes_and_mutated_requests_cause_no_panic() {
        let mut random = Random::new(11);
        for _ in 0..3_000 {
            let mut bytes = LINES.join("\n").into_bytes();
            for _ in 0..=random.below(6) {
                let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
                match random.below(4) {
                    0 => bytes[at] = random.next_u64().to_le_bytes()[0],
                    1 => bytes.truncate(at.max(1)),
                    2 => bytes.insert(at, b'\n'),
                    _ => bytes.extend_from_within(at..),
                }
            }
            fuzz_rpc_connection(&bytes);
        }
    }
}
