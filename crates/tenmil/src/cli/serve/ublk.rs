//! `tenmil serve URI --listen ublk:N`.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use base::{Medium, Span};
use block::DeviceOptions;
use block::uri::Uri;
use dma::Regions;
use host::Clock;
use host::machine::Machine;
use serde_json::json;
use target::ublk::{Done, Limits, News, Plan, Server, shaped, signature};

use super::guests::{claim, refused};
use super::listen::Place;
use super::{REGIONS_MAX, ServeArguments, WATCH_INTERVAL, start_reactors};
use crate::Refused;
use crate::cli::{running, write_out};

/// Requests of a queue, if nothing else is asked for.
const DEPTH: u16 = 128;
/// How long what is under way may take at the end.
const ENDING: Span = Span::from_secs(4);

/// Serves a disk until somebody ends it, or takes it away.
pub(super) fn run(
    arguments: &ServeArguments,
    place: &Place,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let [uri] = arguments.uris.as_slice() else {
        let count = arguments.uris.len();
        return Err(Refused::caller(format!(
            "serve {count} devices as ublk:, expected one: each is a disk of its own"
        )));
    };
    let (machine, clock) = (Machine::this(), Clock::start());
    let regions = Regions::new(REGIONS_MAX);
    let medium = open(arguments, uri, &regions, clock)?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let mut asked = running::serve(running::state_of(&balanced));
    let cores = u16::try_from(reactors.directory().reactors().count()).unwrap_or(u16::MAX);
    let limits =
        Limits { queues: place.queues.unwrap_or(cores), depth: place.depth.unwrap_or(DEPTH) };
    let plan = Plan {
        number: place.number,
        medium,
        is_read_only: arguments.read_only,
        signature: signature(&known_by(uri)),
        limits,
        replaces: place.replaces,
        wants_zero_copy: !place.copies,
        regions,
        reactors: Arc::clone(reactors.directory()),
    };
    let mut server = Server::start(&machine, &plan).map_err(|why| Refused {
        blame: why.blame,
        text: format!("serve {uri}: {}", why.text),
        hint: why.hint,
    })?;
    if server.has_recovered() {
        let number = server.number();
        tracing::info!("ublk:{number} was left behind by a process that has died, and goes on");
    }
    tracing::info!("{}", way(&server));
    host::file::keep()?;
    write_out(out, &ready(arguments, uri, &plan, &server))?;
    let mut done = Done::default();
    while !host::signal::interrupted() && server.is_served() {
        hear(&mut server, &mut done);
        if let Some((_, relay)) = &mut asked {
            relay.pass_on(&running::of(reactors));
        }
        host::thread::rest(WATCH_INTERVAL);
    }
    let is_taken_away = !host::signal::interrupted();
    if is_taken_away {
        tracing::info!("somebody has taken {} away", server.path());
    }
    // The disk first, while what is under way is still served.
    let stopped = server.stop(ENDING);
    balanced.stop();
    hear(&mut server, &mut done);
    tracing::info!("{}", ended(&server, done));
    let removed = server.remove(&machine);
    let mut is_clean = !is_taken_away;
    for why in [stopped.err(), removed.err()].into_iter().flatten() {
        is_clean = false;
        tracing::info!("{why}");
    }
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Takes what has happened: troubles are told, what queues have done is added up.
fn hear(server: &mut Server, all: &mut Done) {
    while let Some(news) = server.next_news() {
        match news {
            News::Trouble(text) => tracing::info!("{text}"),
            News::QueueEnded { done, .. } => {
                all.good += done.good;
                all.failed += done.failed;
                all.lent_bytes += done.lent_bytes;
                all.copied_bytes += done.copied_bytes;
            }
        }
    }
}

/// How data go, and why so.
fn way(server: &Server) -> String {
    let number = server.number();
    match server.zero_copy() {
        Ok(()) => format!("the data of ublk:{number} go between kernel and medium without a copy"),
        Err(why) => format!("the data of ublk:{number} are copied: {why}"),
    }
}

/// What has been done, at the end.
fn ended(server: &Server, done: Done) -> String {
    let Done { good, failed, lent_bytes, copied_bytes } = done;
    let number = server.number();
    format!(
        "ublk:{number} has done {good} requests and failed {failed}; {lent_bytes} bytes went \
         without a copy, {copied_bytes} with one"
    )
}

/// Opens the device and claims it.
fn open(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &Regions,
    clock: Clock,
) -> Result<Arc<dyn Medium>, Refused> {
    let options = DeviceOptions::new(clock, 1);
    let (device, descriptor) = claim(arguments, uri, regions, options, "ublk")?;
    shaped(&device, descriptor, regions).map_err(|why| refused(uri, why))
}

/// What says that two processes serve the same: the name, and where it is looked for if that matters.
pub(super) fn known_by(uri: &Uri) -> String {
    let text = uri.to_string();
    let is_relative = ["file:", "vfio-user:", "key-file="].iter().any(|before| {
        text.match_indices(before).any(|(at, _)| !text[at + before.len()..].starts_with('/'))
    });
    match std::env::current_dir() {
        Ok(here) if is_relative => format!("{text} in {}", here.display()),
        _ => text,
    }
}

/// What is printed once the disk is there.
fn ready(arguments: &ServeArguments, uri: &Uri, plan: &Plan, server: &Server) -> String {
    if !arguments.json {
        return format!("ready {}\n", server.path());
    }
    let of = plan.medium.limits();
    let Limits { queues, depth } = server.limits();
    let line = json!({
        "ready": true,
        "listen": [format!("ublk:{}", server.number())],
        "connect": [server.path()],
        "uri": uri.to_string(),
        "size_bytes": of.block_count * u64::from(of.block_size),
        "block_size": of.block_size,
        "read_only": arguments.read_only,
        "queues": queues,
        "depth": depth,
        "recovered": server.has_recovered(),
        "zero_copy": server.zero_copy().is_ok(),
        "copies_because": server.zero_copy().err(),
    });
    format!("{line}\n")
}

#[cfg(test)]
mod tests {
    use super::known_by;

    #[test]
    fn a_relative_path_is_known_by_where_it_is_looked_for() {
        let known = |uri: &str| known_by(&uri.parse().unwrap());
        assert_eq!(known("file:/a?size=1m"), "file:/a?size=1m");
        assert_eq!(known("ram:1m"), "ram:1m");
        let here = std::env::current_dir().unwrap();
        let expected = format!("stripe:[file:/a],[file:b] in {}", here.display());
        assert_eq!(known("stripe:[file:/a],[file:b]"), expected);
        for relative in ["vfio-user:a.sock", "crypt:[file:/a]?key-file=k"] {
            assert!(known(relative).ends_with(&here.display().to_string()), "{relative}");
        }
    }
}
