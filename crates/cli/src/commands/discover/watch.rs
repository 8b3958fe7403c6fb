//! `tenmil discover --watch`: prints changes of a discovery log.

use std::io::Write;
use std::process::ExitCode;

use serde_json::{Value, json};
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::Clock;

use super::{DiscoverArguments, line_of, object_of};
use crate::commands::write_out;
use tenmil_devices::tcp::{DiscoveryChange, DiscoveryWatch, TcpName};

/// Interval at which the connection's thread is checked for changes.
const POLL_INTERVAL: Span = Span::from_ms(20);

/// Watches the discovery log and prints changes until a limit or Ctrl-C.
pub(super) fn run(
    arguments: &DiscoverArguments,
    name: &TcpName,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::catch_interrupts()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::kernel();
    let end = arguments.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut left = arguments.count.unwrap_or(u64::MAX);
    let mut watch = DiscoveryWatch::begin(name)?;
    loop {
        for change in watch.next_changes()? {
            write_out(out, &printed(&change, watch.generation(), arguments.json))?;
            left -= 1;
            if left == 0 {
                return Ok(ExitCode::SUCCESS);
            }
        }
        if clock.now() >= end || tenmil_linux::signal::interrupted() {
            return Ok(ExitCode::SUCCESS);
        }
        tenmil_linux::thread::sleep(POLL_INTERVAL);
    }
}

/// A change as one line of text or JSON.
fn printed(change: &DiscoveryChange, generation: u64, json: bool) -> String {
    if json { format!("{}\n", object(change, generation)) } else { line(change) }
}

fn line(change: &DiscoveryChange) -> String {
    match change {
        DiscoveryChange::Added(entry) => format!("added  {}\n", line_of(entry)),
        DiscoveryChange::Removed(entry) => format!("removed  {}\n", line_of(entry)),
        DiscoveryChange::Disconnected(why) => {
            format!("disconnected  {}; reconnecting\n", tenmil_base::text::escape(why))
        }
        DiscoveryChange::Reconnected => "reconnected\n".to_owned(),
    }
}

fn object(change: &DiscoveryChange, generation: u64) -> Value {
    let (word, mut object) = match change {
        DiscoveryChange::Added(entry) => ("added", object_of(entry)),
        DiscoveryChange::Removed(entry) => ("removed", object_of(entry)),
        DiscoveryChange::Disconnected(why) => ("disconnected", json!({ "why": why })),
        DiscoveryChange::Reconnected => ("reconnected", json!({})),
    };
    object["change"] = word.into();
    object["generation"] = generation.into();
    object
}

#[cfg(test)]
mod tests {
    use tenmil_wire::log::discovery::DiscoveryEntry;

    use super::{DiscoveryChange, printed};

    #[test]
    fn every_change_is_one_line() {
        let entry = DiscoveryEntry::zeroed();
        for (change, word) in [
            (DiscoveryChange::Added(entry.clone()), "added"),
            (DiscoveryChange::Removed(entry), "removed"),
            (DiscoveryChange::Disconnected("cut".to_owned()), "disconnected"),
            (DiscoveryChange::Reconnected, "reconnected"),
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
