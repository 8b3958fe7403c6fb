//! `tenmil store check`.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use base::Blame;
use block::Opener;
use block::store::{self, Place};
use control::orders::{Long, What, checked};
use serde_json::Value;

use super::super::hand::Hand;
use super::super::write_out;
use super::{EXIT_INTERRUPTED, ShowArguments};
use crate::Refused;

/// Checks, and says by the exit code whether the store is whole.
pub(super) fn check(
    opener: &Opener<'_>,
    show: &ShowArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let place = Place::of(&show.device)?;
    // What nobody has open is not opened to be written to for a look at it.
    let (mut found, process, by) = match Hand::elsewhere_or(opener, &place, store::check)? {
        Ok(found) => (checked(&found), None, String::new()),
        Err(mut hand) => {
            let long = Long { what: What::Check, rate_bytes: None, unheard_max: None };
            let Some(found) = hand.long(&long, "checking")? else {
                return Ok(ExitCode::from(EXIT_INTERRUPTED));
            };
            (found, hand.pid(), hand.by())
        }
    };
    let is_clean = found["clean"] == true;
    let text = match show.json {
        true => {
            found["process"] = process.into();
            format!("{found:#}\n")
        }
        false => as_text(&found) + &by,
    };
    write_out(out, &text)?;
    Ok(ExitCode::from(if is_clean { 0 } else { Blame::Peer.exit_code() }))
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn words(values: &[Value]) -> Vec<&str> {
    values.iter().filter_map(Value::as_str).collect()
}

fn as_text(found: &Value) -> String {
    let mut text = String::new();
    let problems = words(list(found, "problems"));
    for problem in &problems {
        let _ = writeln!(text, "{problem}");
    }
    let word = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    for parent in list(found, "parents") {
        let (uri, of) = (word(parent, "uri"), words(list(parent, "volumes")).join("`, `"));
        let said = parent["problem"].as_str().map_or("is what it was".into(), |problem| {
            format!("not to be had, and neither are they: {problem}")
        });
        let _ = writeln!(text, "parent {uri} of `{of}`: {said}");
    }
    let verdict = match problems.len() {
        0 => "clean".into(),
        count => format!("{count} problems"),
    };
    let [generation, volumes, metadata] =
        ["generation", "volumes", "metadata_blocks"].map(|name| &found[name]);
    let _ = writeln!(
        text,
        "store `{}`: {verdict}; generation {generation}, {volumes} volumes, \
         {metadata} blocks of metadata",
        word(found, "name")
    );
    text
}
