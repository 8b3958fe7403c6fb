//! `tenmil discover --watch`.

use std::io::Write;
use std::process::ExitCode;

use base::{Instant, Span};
use host::Clock;
use serde_json::{Value, json};

use super::{DiscoverArguments, line_of, object_of};
use crate::Refused;
use crate::cli::write_out;
use crate::tcp::{Change, TcpName, Watch};

/// Between two looks at what the connection's thread has heard.
const PAUSE: Span = Span::from_ms(20);

/// Watches and prints until it is told to stop.
pub(super) fn run(
    arguments: &DiscoverArguments,
    name: &TcpName,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::kernel();
    let end = arguments.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut left = arguments.count.unwrap_or(u64::MAX);
    let mut watch = Watch::begin(name)?;
    loop {
        for change in watch.next()? {
            write_out(out, &printed(&change, watch.generation(), arguments.json))?;
            left -= 1;
            if left == 0 {
                return Ok(ExitCode::SUCCESS);
            }
        }
        if clock.now() >= end || host::signal::interrupted() {
            return Ok(ExitCode::SUCCESS);
        }
        host::thread::rest(PAUSE);
    }
}

/// A change in a line.
fn printed(change: &Change, generation: u64, json: bool) -> String {
    if json { format!("{}\n", object(change, generation)) } else { line(change) }
}

fn line(change: &Change) -> String {
    match change {
        Change::Came(entry) => format!("came  {}\n", line_of(entry)),
        Change::Went(entry) => format!("went  {}\n", line_of(entry)),
        Change::Away(why) => format!("away  {}; it is called again\n", base::text::plain(why)),
        Change::Back => "back  it answers again\n".to_owned(),
    }
}

fn object(change: &Change, generation: u64) -> Value {
    let (word, mut object) = match change {
        Change::Came(entry) => ("came", object_of(entry)),
        Change::Went(entry) => ("went", object_of(entry)),
        Change::Away(why) => ("away", json!({ "why": why })),
        Change::Back => ("back", json!({})),
    };
    object["change"] = word.into();
    object["generation"] = generation.into();
    object
}

#[cfg(test)]
mod tests {
    use wire::log::discovery::DiscoveryEntry;

    use super::{Change, printed};

    #[test]
    fn every_change_is_one_line() {
        let entry = DiscoveryEntry::zeroed();
        for (change, word) in [
            (Change::Came(entry.clone()), "came"),
            (Change::Went(entry), "went"),
            (Change::Away("cut".to_owned()), "away"),
            (Change::Back, "back"),
        ] {
            let text = printed(&change, 7, false);
            assert!(text.starts_with(word) && text.lines().count() == 1, "{text}");
            let object = printed(&change, 7, true);
            assert_eq!(object.lines().count(), 1);
            let object: serde_json::Value = serde_json::from_str(&object).unwrap();
            assert_eq!((&object["change"], &object["generation"]), (&word.into(), &7.into()));
        }
    }
}
