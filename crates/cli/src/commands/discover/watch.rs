//! `tenmil discover --watch`: prints changes of a discovery log.

use std::io::Write;
use std::process::ExitCode;

use serde_json::{Value, json};
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::Clock;

use super::{DiscoverArguments, entry_json, entry_line};
use crate::commands::write_stdout;
use tenmil_devices::tcp::{DiscoveryChange, DiscoveryWatch, TcpSecurity, TcpUri};

/// Interval at which the connection's thread is checked for changes.
const POLL_INTERVAL: Span = Span::from_ms(20);

/// Watches the discovery log and prints changes until a limit or Ctrl-C.
pub(super) fn watch_discovery_log(
    arguments: &DiscoverArguments,
    name: &TcpUri,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::on_kernel_clock();
    let end = arguments.time.map_or(Instant::NEVER, |time| clock.now().after(time));
    let mut left = arguments.count.unwrap_or(u64::MAX);
    let mut watch = DiscoveryWatch::begin(name)?;
    loop {
        for change in watch.next_changes()? {
            write_stdout(
                out,
                &format_change(&change, watch.generation(), (arguments.json, &name.security)),
            )?;
            left -= 1;
            if left == 0 {
                return Ok(ExitCode::SUCCESS);
            }
        }
        if clock.now() >= end || tenmil_linux::signal::is_stop_requested() {
            return Ok(ExitCode::SUCCESS);
        }
        tenmil_linux::named_thread::sleep(POLL_INTERVAL);
    }
}

/// A change as one line of text or JSON.
fn format_change(
    change: &DiscoveryChange,
    generation: u64,
    (json, security): (bool, &TcpSecurity),
) -> String {
    if json {
        format!("{}\n", change_json(change, generation, security))
    } else {
        change_line(change, security)
    }
}

fn change_line(change: &DiscoveryChange, security: &TcpSecurity) -> String {
    match change {
        DiscoveryChange::Added(entry) => format!("added  {}\n", entry_line(entry, security)),
        DiscoveryChange::Removed(entry) => format!("removed  {}\n", entry_line(entry, security)),
        DiscoveryChange::Disconnected(why) => {
            format!("disconnected  {}; reconnecting\n", tenmil_base::text::escape(why))
        }
        DiscoveryChange::Reconnected => "reconnected\n".to_owned(),
    }
}

fn change_json(change: &DiscoveryChange, generation: u64, security: &TcpSecurity) -> Value {
    let (word, mut object) = match change {
        DiscoveryChange::Added(entry) => ("added", entry_json(entry, security)),
        DiscoveryChange::Removed(entry) => ("removed", entry_json(entry, security)),
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

    use super::{DiscoveryChange, TcpSecurity, format_change};

    #[test]
    fn every_change_is_printed_on_one_line() {
        let (entry, security) = (DiscoveryEntry::zeroed(), TcpSecurity::default());
        for (change, word) in [
            (DiscoveryChange::Added(entry.clone()), "added"),
            (DiscoveryChange::Removed(entry), "removed"),
            (DiscoveryChange::Disconnected("cut".to_owned()), "disconnected"),
            (DiscoveryChange::Reconnected, "reconnected"),
        ] {
            let text = format_change(&change, 7, (false, &security));
            assert!(text.starts_with(word) && text.lines().count() == 1, "{text}");
            let object = format_change(&change, 7, (true, &security));
            assert_eq!(object.lines().count(), 1);
            let object: serde_json::Value = serde_json::from_str(&object).unwrap();
            assert_eq!((&object["change"], &object["generation"]), (&word.into(), &7.into()));
        }
    }
}
