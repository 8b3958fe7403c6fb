//! `tenmil pool check`: cross-checks the metadata of a pool.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use serde_json::Value;
use tenmil_base::{Error, ErrorCategory};
use tenmil_block::Opener;
use tenmil_block::uri::short_form_for_terminal;
use tenmil_drivers::pool::{self, VolumeRef};
use tenmil_rpc::pool_commands::{JobKind, JobSpec, check_json};

use super::super::pool_access::PoolAccess;
use super::super::write_stdout;
use super::{EXIT_INTERRUPTED, ShowArguments};

/// Checks the metadata; the exit code shows whether the pool is intact.
pub(super) fn check_pool(
    opener: &Opener<'_>,
    show: &ShowArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let place = VolumeRef::parse(&show.device)?;
    // A pool that is not open in any process is read without being opened for writing.
    let (mut found, process, by) =
        match PoolAccess::run_local_or_connect(opener, &place, pool::check_closed_pool)? {
            Ok(found) => (check_json(&found), None, String::new()),
            Err(mut access) => {
                let long = JobSpec { what: JobKind::Check, rate_bytes: None, unheard_max: None };
                let Some(found) = access.run_job(&long, "checking")? else {
                    return Ok(ExitCode::from(EXIT_INTERRUPTED));
                };
                (found, access.owner_pid(), access.owner_line())
            }
        };
    let is_clean = found["clean"] == true;
    let text = match show.json {
        true => {
            found["process"] = process.into();
            format!("{found:#}\n")
        }
        false => check_result_text(&found) + &by,
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::from(if is_clean { 0 } else { ErrorCategory::Remote.exit_code() }))
}

fn json_list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn json_strings(values: &[Value]) -> Vec<&str> {
    values.iter().filter_map(Value::as_str).collect()
}

fn check_result_text(found: &Value) -> String {
    let mut text = String::new();
    let problems = json_strings(json_list(found, "problems"));
    for problem in &problems {
        let _ = writeln!(text, "{problem}");
    }
    let word = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    for parent in json_list(found, "parents") {
        let (uri, of) = (
            short_form_for_terminal(&word(parent, "uri")),
            json_strings(json_list(parent, "volumes")).join("`, `"),
        );
        let state = parent["problem"].as_str().map_or("unchanged".into(), |problem| {
            format!("not accessible, so the volumes are not: {problem}")
        });
        let _ = writeln!(text, "parent {uri} of `{of}`: {state}");
    }
    let verdict = match problems.len() {
        0 => "clean".into(),
        count => format!("{count} problems"),
    };
    let [generation, volumes, metadata] =
        ["generation", "volumes", "metadata_blocks"].map(|name| &found[name]);
    let _ = writeln!(
        text,
        "pool `{}`: {verdict}; generation {generation}, {volumes} volumes, \
         {metadata} blocks of metadata",
        word(found, "name")
    );
    text
}
