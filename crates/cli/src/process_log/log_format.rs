//! Formats of the log: lines of text, lines of JSON, entries of the journal.
//!
//! | format | a record |
//! |---|---|
//! | text | `2026-11-28T02:03:04.567890Z note: message name=value`; the time only if the command runs for long |
//! | JSON | `{"time":…,"level":"info","module":…,"message":…,NAME:VALUE,…}` |
//! | journald | `MESSAGE`, `PRIORITY`, `TENMIL_MODULE`, and `TENMIL_NAME` for each field |
//!
//! A record with the field `event` has a message that is complete for people, so its line of text has no
//! fields. Names and values come from peers too: no format lets them end a line, add a field, or act on a
//! terminal.

use std::fmt::Write as _;
use std::io::{self, Write};

use tenmil_base::text::{escape, is_terminal_control};
use tenmil_linux::journal::{JournalEntry, JournalSocket, is_stderr_a_journal_stream};
use tenmil_linux::process_log::{LogField, LogOutput, LogRecord, LogValue};

/// Format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object in each line.
    Json,
    /// Entries of systemd's journal.
    Journald,
}

/// Lines of text.
pub(super) struct TextLines<W> {
    pub(super) output: W,
    /// Whether a line begins with its time.
    pub(super) has_time: bool,
}

/// Lines of JSON.
pub(super) struct JsonLines<W>(pub(super) W);

/// Entries of the journal.
pub(super) struct JournalEntries(pub(super) JournalSocket);

/// Name of the field that says what has happened. Records with it have complete messages.
const EVENT: &str = "event";
/// Members of a JSON line that are not fields.
const JSON_MEMBERS: [&str; 4] = ["time", "level", "module", "message"];
/// `SYSLOG_IDENTIFIER` of journal entries: `journalctl -t tenmil`.
const IDENTIFIER: &str = "tenmil";

impl LogFormat {
    /// All formats with their words.
    pub(crate) const ALL: [(&'static str, Self); 3] =
        [("text", Self::Text), ("json", Self::Json), ("journald", Self::Journald)];

    /// Format with this name.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found
            .map(|(_, format)| *format)
            .ok_or_else(|| format!("`{text}` is no format, expected text, json or journald"))
    }

    /// Format without an option: the journal's, if standard error leads there.
    pub(super) fn standard() -> Self {
        if is_stderr_a_journal_stream() { Self::Journald } else { Self::Text }
    }
}

impl<W: Write + Send> LogOutput for TextLines<W> {
    fn write_record(&mut self, record: &LogRecord) -> io::Result<()> {
        write_line(&mut self.output, text_line(record, self.has_time))
    }
}

impl<W: Write + Send> LogOutput for JsonLines<W> {
    fn write_record(&mut self, record: &LogRecord) -> io::Result<()> {
        write_line(&mut self.0, json_line(record))
    }
}

impl LogOutput for JournalEntries {
    fn write_record(&mut self, record: &LogRecord) -> io::Result<()> {
        self.0.send(&journal_entry(record))
    }
}

/// Writes a line in one call, so that lines of several processes do not mix.
fn write_line(output: &mut impl Write, mut line: String) -> io::Result<()> {
    line.push('\n');
    output.write_all(line.as_bytes())?;
    output.flush()
}

fn text_line(record: &LogRecord, has_time: bool) -> String {
    let mut line = String::new();
    // Writing to a string does not fail.
    if has_time {
        let _ = write!(line, "{} ", record.at);
    }
    let _ = write!(line, "{}: {}", record.level.label(), escape(&record.message));
    if !record.fields.iter().any(|field| field.name == EVENT) {
        for LogField { name, value } in &record.fields {
            let _ = write!(line, " {name}={}", text_value(value));
        }
    }
    line
}

/// A value in a line of text: in quotes, unless it is one word.
fn text_value(value: &LogValue) -> String {
    match value {
        LogValue::Text(text) => {
            let is_word = |c: char| !c.is_whitespace() && !matches!(c, '"' | '=' | '\\');
            match !text.is_empty() && text.chars().all(is_word) {
                true => escape(text),
                false => {
                    escape(&format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")))
                }
            }
        }
        LogValue::Unsigned(number) => number.to_string(),
        LogValue::Signed(number) => number.to_string(),
        LogValue::Float(number) => number.to_string(),
        LogValue::Bool(value) => value.to_string(),
    }
}

fn json_line(record: &LogRecord) -> String {
    let mut line = format!(
        "{{\"time\":\"{}\",\"level\":\"{}\",\"module\":{},\"message\":{}",
        record.at,
        record.level.name(),
        json_string(record.module),
        json_string(&record.message)
    );
    for LogField { name, value } in &record.fields {
        let mark = if JSON_MEMBERS.contains(name) { "_" } else { "" };
        let value = match value {
            LogValue::Text(text) => json_string(text),
            // JSON has no word for these.
            LogValue::Float(number) if !number.is_finite() => format!("\"{number}\""),
            other => text_value(other),
        };
        // Writing to a string does not fail.
        let _ = write!(line, ",{}:{value}", json_string(&format!("{name}{mark}")));
    }
    line.push('}');
    line
}

/// A JSON string in which nothing acts on a terminal.
fn json_string(text: &str) -> String {
    let mut units = [0; 2];
    let mut string = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => string.extend(['\\', character]),
            '\n' => string.push_str("\\n"),
            '\t' => string.push_str("\\t"),
            other if is_terminal_control(other) => {
                for unit in other.encode_utf16(&mut units) {
                    // Writing to a string does not fail.
                    let _ = write!(string, "\\u{unit:04x}");
                }
            }
            other => string.push(other),
        }
    }
    string.push('"');
    string
}

fn journal_entry(record: &LogRecord) -> JournalEntry {
    let mut entry = JournalEntry::default();
    entry.add_field("MESSAGE", &escape(&record.message));
    entry.add_field("PRIORITY", &record.level.syslog_priority().to_string());
    entry.add_field("SYSLOG_IDENTIFIER", IDENTIFIER);
    entry.add_field("TENMIL_MODULE", record.module);
    for LogField { name, value } in &record.fields {
        let value = match value {
            LogValue::Text(text) => escape(text),
            other => text_value(other),
        };
        entry.add_field(&format!("TENMIL_{name}"), &value);
    }
    entry
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    use serde_json::{Value, json};
    use tenmil_base::UtcTime;
    use tenmil_linux::journal::JournalSocket;
    use tenmil_linux::process_log::{LogField, LogLevel, LogOutput, LogRecord, LogValue};

    use super::{JournalEntries, JsonLines, TextLines, json_line, text_line};

    /// A name that a hostile host could have.
    const HOSTILE: &str = "nqn.x\n{\"level\":\"error\"}\u{1b}[2J\u{202e} host=other \"";

    fn record(message: &str, fields: Vec<(&'static str, LogValue)>) -> LogRecord {
        let fields = fields.into_iter().map(|(name, value)| LogField { name, value });
        LogRecord {
            cause: String::new(),
            at: UtcTime { unix_us: 1_795_831_384_000_005 },
            level: LogLevel::Warning,
            module: "tenmil_cli::test",
            message: message.into(),
            fields: fields.collect(),
        }
    }

    #[test]
    fn text_line_has_time_level_message_and_quoted_values() {
        let fields = vec![
            ("blocks", LogValue::Unsigned(8)),
            ("device", LogValue::Text("file:/a b".into())),
            ("host", LogValue::Text(HOSTILE.into())),
            ("empty", LogValue::Text(String::new())),
        ];
        let record = record("medium\nerror", fields);
        let expected = "warning: medium\\u{a}error blocks=8 device=\"file:/a b\" \
             host=\"nqn.x\\u{a}{\\\"level\\\":\\\"error\\\"}\\u{1b}[2J\\u{202e} host=other \\\"\" empty=\"\"";
        assert_eq!(text_line(&record, false), expected);
        assert_eq!(text_line(&record, true), format!("2026-11-28T02:03:04.000005Z {expected}"));
    }

    #[test]
    fn event_is_a_sentence_in_text_and_fields_in_json() {
        let event = record("a connected", vec![("event", LogValue::Text("connect".into()))]);
        assert_eq!(text_line(&event, false), "warning: a connected");
        let value: Value = serde_json::from_str(&json_line(&event)).unwrap();
        assert_eq!(value["event"], json!("connect"));
    }

    #[test]
    fn json_line_parses_to_what_was_logged_whatever_a_name_contains() {
        let fields = vec![
            ("host", LogValue::Text(HOSTILE.into())),
            ("time", LogValue::Text("forged".into())),
            ("reads", LogValue::Unsigned(u64::MAX)),
            ("change", LogValue::Signed(-1)),
            ("rate", LogValue::Float(0.5)),
            ("nan", LogValue::Float(f64::NAN)),
            ("tls", LogValue::Bool(true)),
            ("tag", LogValue::Text("\u{e0001}".into())),
        ];
        let record = record(HOSTILE, fields);
        let line = json_line(&record);
        assert!(!line.chars().any(tenmil_base::text::is_terminal_control), "{line}");
        let value: Value = serde_json::from_str(&line).unwrap();
        let expected = json!({
            "time": "2026-11-28T02:03:04.000005Z",
            "level": "warn",
            "module": "tenmil_cli::test",
            "message": HOSTILE,
            "host": HOSTILE,
            "time_": "forged",
            "reads": u64::MAX,
            "change": -1,
            "rate": 0.5,
            "nan": "NaN",
            "tls": true,
            "tag": "\u{e0001}",
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn record_is_one_line() {
        let (mut text, mut json) = (Vec::new(), Vec::new());
        let hostile = record(HOSTILE, vec![("host", LogValue::Text(HOSTILE.into()))]);
        TextLines { output: &mut text, has_time: true }.write_record(&hostile).unwrap();
        JsonLines(&mut json).write_record(&hostile).unwrap();
        for bytes in [text, json] {
            let text = String::from_utf8(bytes).unwrap();
            assert_eq!((text.lines().count(), text.ends_with('\n')), (1, true), "{text}");
        }
    }

    #[test]
    fn journal_entry_has_a_field_for_each_value_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let journal = UnixDatagram::bind(&path).unwrap();
        let mut entries = JournalEntries(JournalSocket::connect_to(&path).unwrap());
        let fields = vec![
            ("event", LogValue::Text("connect".into())),
            ("host", LogValue::Text("a\nPRIORITY=0".into())),
            ("connection", LogValue::Unsigned(7)),
        ];
        entries.write_record(&record("host connected", fields)).unwrap();
        journal.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = [0; 4096];
        let count = journal.recv(&mut bytes).unwrap();
        let expected = "MESSAGE=host connected\nPRIORITY=4\nSYSLOG_IDENTIFIER=tenmil\n\
             TENMIL_MODULE=tenmil_cli::test\nTENMIL_EVENT=connect\nTENMIL_HOST=a\\u{a}PRIORITY=0\n\
             TENMIL_CONNECTION=7\n";
        assert_eq!(String::from_utf8_lossy(&bytes[..count]), expected);
    }
}
