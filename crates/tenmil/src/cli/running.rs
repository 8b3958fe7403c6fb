//! Running processes: being one that can be asked, and finding one to ask.

use std::io::Write;
use std::sync::Arc;

use base::Span;
use block::hear_of_lost_writes;
use block::mirror::hear_of_mirrors;
use block::store::{hear_of_room, hear_of_stops};
use clap::Args;
use control::orders::Orders;
use control::{
    Balancing, Client, Process, Reactors, Refusal, Relay, Running, Server, State, TABLE,
    announcements,
};
use host::machine::Machine;
use host::process::command_line;
use host::runtime_directory::RuntimeDirectory;

use crate::Refused;
use crate::balance::{Balanced, put_back_frequencies};
use crate::perf::engine;
use crate::perf::options::PerfOptions;
use crate::perf::outcome::PerfOutcome;
use crate::perf::progress::Progress;
use crate::simulation::SimOptions;

/// Which process is asked.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(super) struct Whom {
    /// Ask this process; without it, the only one that runs
    #[arg(long, value_name = "N")]
    pub(super) pid: Option<u32>,
}

/// How long a process may take to answer.
pub(super) const PATIENCE: Span = Span::from_secs(10);

/// Runs `perf`, and lets others ask meanwhile.
pub(super) fn perf(
    options: &PerfOptions,
    progress: &Arc<Progress>,
    watch: engine::Watch<'_>,
) -> Result<PerfOutcome, Refused> {
    let (theirs, steered) = (Arc::clone(progress), Arc::clone(progress));
    let state = State::new()
        .with(Reactors::new(move || theirs.reactors()))
        .with(Balancing::new(move || steered.steering()));
    let mut served = serve(state);
    engine::run(options, progress, &mut |progress| {
        if let (Some((_, relay)), Some(running)) = (&mut served, progress.reactors()) {
            relay.pass_on(&running);
        }
        watch(progress);
    })
}

/// Runs `sim`, and lets others ask meanwhile.
pub(super) fn sim(options: &SimOptions, out: &mut dyn Write) -> Result<(), Refused> {
    let _served = serve(State::new());
    crate::simulation::run(options, out)
}

/// What can be asked of a process with these reactors.
pub(super) fn state_of(balanced: &Balanced) -> State {
    let (running, steering) = (of(&balanced.reactors), balanced.balance.steering().clone());
    State::new()
        .with(Reactors::new(move || Some(running.clone())))
        .with(Balancing::new(move || Some(steering.clone())))
}

/// These reactors, for whoever looks at them.
pub(super) fn of(reactors: &reactor::Reactors) -> Running {
    Running { directory: Arc::clone(reactors.directory()), clock: *reactors.clock() }
}

/// Serves what can be asked of this process for as long as the value lives. Without a socket the
/// process still does what it is for, and says why there is none. What a process that was killed has
/// left behind is put right first.
pub(super) fn serve(state: State) -> Option<(Server, Relay)> {
    match start(state) {
        Ok(served) => Some(served),
        Err(why) => {
            hear_of_room(|news| tracing::info!(cause = %news.store, "{news}"));
            hear_of_lost_writes(|news| tracing::warn!("{news}"));
            hear_of_mirrors(|news| tracing::info!("{news}"));
            hear_of_stops(|news| tracing::warn!("{news}"));
            tracing::info!("`tenmil get` will not reach this process: {why}");
            None
        }
    }
}

fn start(state: State) -> Result<(Server, Relay), String> {
    let directory = RuntimeDirectory::of_user().map_err(|error| error.to_string())?;
    put_back_frequencies(&Machine::this(), &directory, &|text| tracing::info!("{text}"));
    let (announcer, announced) =
        announcements().map_err(|error| format!("make an event descriptor: {error}"))?;
    let log = crate::log::of_process().cloned();
    let state = state.with(Process { version: env!("CARGO_PKG_VERSION"), log });
    let paths = crate::tcp::paths_of_all();
    paths.announce_by(announcer.clone());
    let state = state.with(paths.clone());
    let state = state.with(Orders::new(crate::KINDS, announcer.clone()));
    let server = Server::start(&directory, std::process::id(), &TABLE, state, announced)
        .map_err(|refused| refused.to_string())?;
    let teller = announcer.clone();
    hear_of_room(move |news| {
        tracing::info!(cause = %news.store, "{news}");
        teller.announce_room(news);
    });
    let teller = announcer.clone();
    hear_of_lost_writes(move |news| {
        tracing::warn!("{news}");
        teller.announce_lost_write(news);
    });
    let teller = announcer.clone();
    hear_of_mirrors(move |news| {
        tracing::info!("{news}");
        teller.announce_mirror(news);
    });
    let teller = announcer.clone();
    hear_of_stops(move |news| {
        tracing::warn!("{news}");
        teller.announce_stop(news);
    });
    Ok((server, Relay::new(announcer)))
}

/// Connects to the process that is meant.
pub(super) fn connect(whom: Whom) -> Result<Client, Refused> {
    let directory = directory()?;
    let pid = choose(whom.pid, &listening(&directory)?)?;
    Client::connect(&directory.socket_of(pid), PATIENCE).map_err(refused)
}

/// Where the processes of this user listen.
pub(super) fn directory() -> Result<RuntimeDirectory, Refused> {
    RuntimeDirectory::of_user().map_err(|error| {
        Refused::machine(error.to_string())
            .with_hint("look at who made it, and move it away if nobody needs it")
    })
}

/// The processes that listen there.
pub(super) fn listening(directory: &RuntimeDirectory) -> Result<Vec<u32>, Refused> {
    directory.listening().map_err(|error| {
        Refused::machine(format!("look into {}: {error}", directory.path().display()))
    })
}

/// The process that is meant: the one that was named, or the only one.
pub(super) fn choose(wanted: Option<u32>, running: &[u32]) -> Result<u32, Refused> {
    match (wanted, running) {
        (Some(pid), _) if running.contains(&pid) => Ok(pid),
        (None, [pid]) => Ok(*pid),
        (None, []) => Err(Refused::caller("no tenmil process of this user runs, expected one")
            .with_hint("start one that runs for a while, such as `tenmil perf emu:null -t 60`")),
        (None, _) => Err(Refused::caller(format!(
            "{} tenmil processes run, expected --pid with one of {}",
            running.len(),
            listed(running)
        ))),
        (Some(pid), []) => Err(Refused::caller(format!(
            "--pid {pid}: no tenmil process of this user runs, expected one"
        ))),
        (Some(pid), _) => Err(Refused::caller(format!(
            "--pid {pid}: it is no tenmil process of this user that runs, expected one of {}",
            listed(running)
        ))),
    }
}

/// `4711 (tenmil perf), 4712 (tenmil perf -t 60)`.
fn listed(running: &[u32]) -> String {
    let one = |pid: &u32| match command_line(*pid) {
        Some(words) => {
            let words: String =
                words.join(" ").chars().filter(|c| !base::text::acts(*c)).take(60).collect();
            format!("{pid} ({words})")
        }
        None => pid.to_string(),
    };
    running.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A refusal of the serving side, or of the client, as one of ours.
pub(super) fn refused(refusal: Refusal) -> Refused {
    let Refusal { blame, message, hint, .. } = refusal;
    Refused { blame, text: message, hint }
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn the_only_process_is_meant_unless_one_is_named() {
        assert_eq!(choose(None, &[7]), Ok(7));
        assert_eq!(choose(Some(8), &[7, 8]), Ok(8));
    }

    #[test]
    fn none_or_several_are_refused_with_what_there_is() {
        let none = choose(None, &[]).unwrap_err();
        assert_eq!(none.blame.exit_code(), 2);
        assert!(none.hint.unwrap().contains("tenmil perf"));
        let us = std::process::id();
        let several = choose(None, &[us, u32::MAX]).unwrap_err();
        assert!(several.text.starts_with("2 tenmil processes run, expected --pid with one of "));
        assert!(several.text.contains(&format!("{us} (")), "with its command line: {several}");
        assert!(several.text.ends_with("4294967295"), "{several}");
        let other = choose(Some(5), &[u32::MAX]).unwrap_err();
        assert!(other.text.starts_with("--pid 5: ") && other.text.ends_with("4294967295"));
        assert!(choose(Some(5), &[]).unwrap_err().text.starts_with("--pid 5: "));
    }
}
