//! The process itself.

use host::log::Log;
use host::process::{Usage, command_line};
use serde_json::{Value, json};

use crate::method::{Call, Method, Verb};
use crate::refusal::Refusal;
use crate::shape::{Field, Shape};

/// What a program says about itself.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its version.
    pub version: &'static str,
    /// Its log, if it has one.
    pub log: Option<Log>,
}

const WHOLE: Shape = Shape::Maybe(&Shape::Whole);

pub(super) const METHODS: &[Method] = &[Method {
    verb: Verb::Get,
    name: "process",
    parameters: &[],
    answer: Shape::Record(&[
        Field::new("version", Shape::Text, "version of the program"),
        Field::new("pid", Shape::Whole, "number of the process"),
        Field::new("command_line", Shape::Texts, "the words it was started with"),
        Field::new("uptime_ns", WHOLE, "time since it was started"),
        Field::new("processor_time_ns", Shape::Whole, "time on processors, of all threads"),
        Field::new("resident_bytes", WHOLE, "memory in use"),
        Field::new("resident_max_bytes", WHOLE, "the most memory that was in use at once"),
        Field::new("descriptors", WHOLE, "open descriptors"),
        Field::new("threads", WHOLE, "threads"),
        Field::new("log_lines_written", WHOLE, "lines written to the log"),
        Field::new("log_lines_suppressed", WHOLE, "log lines that a rate limit kept back"),
        Field::new(
            "log_lines_dropped",
            WHOLE,
            "log lines lost because the log was not read in time or could not be written",
        ),
    ]),
    help: "Tell what the process is and what it has used",
    example: "tenmil get process",
    run: process,
}];

fn process(call: &Call<'_>) -> Result<Value, Refusal> {
    let Process { version, log } = call.state.part("word about itself")?;
    let lines = log.as_ref().map(Log::counters);
    let (usage, pid) = (Usage::read(), std::process::id());
    Ok(json!({
        "version": version,
        "pid": pid,
        "command_line": command_line(pid).unwrap_or_default(),
        "uptime_ns": usage.age.map(|age| age.ns),
        "processor_time_ns": usage.processor_time.ns,
        "resident_bytes": usage.resident_bytes,
        "resident_max_bytes": usage.resident_max_bytes,
        "descriptors": usage.descriptors,
        "threads": usage.threads,
        "log_lines_written": lines.map(|lines| lines.written),
        "log_lines_suppressed": lines.map(|lines| lines.suppressed),
        "log_lines_dropped": lines.map(|lines| lines.dropped),
    }))
}
