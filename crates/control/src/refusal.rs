//! Why something was not done, in a form that programs can act on.

use core::fmt;

use base::Blame;
use serde_json::{Value, json};

/// Why a request was refused. Programs act on `code` and `blame`; the text is for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong, as a word that does not change.
    pub code: Code,
    /// Whose move it is.
    pub blame: Blame,
    /// What was found and what had been expected, on one line.
    pub message: String,
    /// What to do next, if we know it.
    pub hint: Option<String>,
}

/// What is wrong. The words never change their meaning; new ones may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The line is not JSON.
    NotJson,
    /// The line is JSON and not a request.
    NotARequest,
    /// No method has this name.
    NoSuchMethod,
    /// The method has no parameter of this name.
    NoSuchParameter,
    /// A parameter that has to be given is not.
    MissingParameter,
    /// A parameter has a value that it cannot have.
    BadValue,
    /// What the method is about does not exist in this process.
    Absent,
    /// It could not be done.
    NotDone,
    /// The line is longer than a line may be.
    LineTooLong,
    /// A line was begun and not ended in time, or an answer did not come in time.
    TooSlow,
    /// All connections are taken.
    Busy,
    /// This user may not.
    NotAllowed,
    /// There is no process to talk to, or there are several and none was named.
    NoProcess,
    /// The other side has gone.
    Gone,
    /// A word of a version that is newer than this one.
    Unknown,
}

impl Code {
    /// Every code, with what it means.
    pub const ALL: [(Self, &'static str, &'static str); 14] = [
        (Self::NotJson, "not_json", "the line is not JSON, or names a member twice"),
        (Self::NotARequest, "not_a_request", "the line is JSON and not a request"),
        (Self::NoSuchMethod, "no_such_method", "no method has this name"),
        (Self::NoSuchParameter, "no_such_parameter", "the method has no parameter of this name"),
        (Self::MissingParameter, "missing_parameter", "a parameter that has to be given is not"),
        (Self::BadValue, "bad_value", "a parameter has a value that it cannot have"),
        (Self::Absent, "absent", "what the method is about does not exist in this process"),
        (Self::NotDone, "not_done", "it was tried and could not be done"),
        (Self::LineTooLong, "line_too_long", "the line is too long; the connection ends"),
        (Self::TooSlow, "too_slow", "a line was begun and not ended in time; the connection ends"),
        (Self::Busy, "busy", "all connections are taken; the connection ends"),
        (Self::NotAllowed, "not_allowed", "this user may not; the connection ends"),
        (Self::NoProcess, "no_process", "none or several to talk to; said by the client"),
        (Self::Gone, "gone", "the other side has gone; said by the client"),
    ];

    /// The word.
    pub fn name(self) -> &'static str {
        let row = Self::ALL.iter().find(|(code, ..)| *code == self);
        row.map_or("unknown", |(_, name, _)| name)
    }

    /// The code of a word.
    pub fn named(name: &str) -> Self {
        let row = Self::ALL.iter().find(|(_, known, _)| *known == name);
        row.map_or(Self::Unknown, |(code, ..)| *code)
    }
}

impl Refusal {
    /// The caller asked for something that cannot be.
    pub fn caller(code: Code, message: impl Into<String>) -> Self {
        Self { code, blame: Blame::Caller, message: message.into(), hint: None }
    }

    /// The machine is not set up for it.
    pub fn machine(code: Code, message: impl Into<String>) -> Self {
        Self { code, blame: Blame::Machine, message: message.into(), hint: None }
    }

    /// The other side broke its contract.
    pub fn peer(code: Code, message: impl Into<String>) -> Self {
        Self { code, blame: Blame::Peer, message: message.into(), hint: None }
    }

    /// The same, with the next thing to try.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// As it stands behind `"error"`.
    pub fn to_json(&self) -> Value {
        let blame = blame_name(self.blame);
        let mut error =
            json!({ "code": self.code.name(), "blame": blame, "message": self.message });
        if let Some(hint) = &self.hint {
            error["hint"] = hint.as_str().into();
        }
        error
    }

    /// Reads what stands behind `"error"`. `None` if that is no refusal.
    pub fn from_json(error: &Value) -> Option<Self> {
        let text = |name| error.get(name).and_then(Value::as_str);
        let blames = [Blame::Caller, Blame::Machine, Blame::Peer];
        let blame = blames.into_iter().find(|blame| Some(blame_name(*blame)) == text("blame"))?;
        Some(Self {
            code: Code::named(text("code")?),
            blame,
            message: text("message")?.to_owned(),
            hint: text("hint").map(str::to_owned),
        })
    }
}

fn blame_name(blame: Blame) -> &'static str {
    match blame {
        Blame::Caller => "caller",
        Blame::Machine => "machine",
        Blame::Peer => "peer",
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl core::error::Error for Refusal {}

/// Text from outside as it may stand in a message: quoted, on one line, and not too long.
pub(crate) fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    let mut shown: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}

/// `a, b or c`.
pub(crate) fn either(names: &[&str]) -> String {
    match names {
        [] => "none".into(),
        [name] => (*name).to_owned(),
        [rest @ .., last] => format!("{} or {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use base::Blame;
    use serde_json::json;

    use super::{Code, Refusal, either, quoted};

    #[test]
    fn every_code_has_a_word_of_its_own_that_leads_back_to_it() {
        for (code, name, meaning) in Code::ALL {
            assert_eq!((code.name(), Code::named(name)), (name, code));
            assert!(!meaning.is_empty());
        }
        assert_eq!(Code::named("of_a_later_version"), Code::Unknown);
    }

    #[test]
    fn a_refusal_crosses_the_wire_whole() {
        let bare = Refusal::peer(Code::Gone, "it went");
        assert_eq!(bare.to_json(), json!({"code": "gone", "blame": "peer", "message": "it went"}));
        for refusal in [bare.with_hint("come back"), Refusal::machine(Code::NotDone, "no")] {
            assert_eq!(Refusal::from_json(&refusal.to_json()), Some(refusal));
        }
        let odd = json!({"code": "gone", "blame": "nobody", "message": ""});
        assert_eq!(Refusal::from_json(&odd), None);
        assert_eq!(Refusal::caller(Code::Busy, "").blame, Blame::Caller);
    }

    #[test]
    fn text_from_outside_stays_on_one_short_line() {
        assert_eq!(quoted("a\nb"), "`a\\nb`");
        assert_eq!(quoted(&"x".repeat(41)), format!("`{}…`", "x".repeat(40)));
        assert_eq!(either(&["a"]), "a");
        assert_eq!(either(&["a", "b", "c"]), "a, b or c");
    }
}
