//! Fuzz entry point of the rules of injected faults, which must never panic on any input.

use crate::FaultRule;

/// Parses `bytes` as rules, and parses the text form of the result again.
///
/// # Panics
///
/// If an invariant is violated: a bug in this crate, never in the input.
pub fn fuzz(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(rules) = FaultRule::parse_all(&text) {
        let written: Vec<String> = rules.iter().map(ToString::to_string).collect();
        assert_eq!(FaultRule::parse_all(&written.join(";")), Ok(rules), "{written:?}");
    }
}
