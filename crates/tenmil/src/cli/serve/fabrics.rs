//! `tenmil serve` over NVMe/TCP.

mod limits;
mod ready;
mod standing;

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use base::Span;
use block::uri::Uri;
use control::configuration::{self, Configuration, Line};
use control::{Announcer, Devices, Queues, Relay};
use host::{Clock, Thread};
use target::tcp::{DiscoveryName, News, Server, ServerPlan, Service, StateDirectory};

use self::ready::ready;
use self::standing::{Standing, Unfit, World};
use super::{
    REGIONS_MAX, ServeArguments, WATCH_INTERVAL, read_configuration, running, start_reactors,
};
use crate::Refused;
use crate::balance::Balanced;
use crate::cli::write_out;
use crate::pcie::regions_for;
use crate::tcp::{discovery_name, sockets};

/// What a subsystem is called if nobody says.
const NQN: &str = "nqn.2026-01.org.tenmil:disk";
/// How long its end may take: less than the 5 seconds after which a service manager loses patience.
const END_MAX: Span = Span::from_secs(4);
const END_INTERVAL: Span = Span::from_ms(10);

/// What the arguments ask for, as a file would say it.
pub(super) fn asked(
    arguments: &ServeArguments,
    listeners: Vec<SocketAddr>,
) -> Result<Configuration, Refused> {
    let hosts = match (arguments.host.is_empty(), arguments.allow_any_host) {
        (false, false) => configuration::Hosts::Only(arguments.host.clone()),
        (true, _) => configuration::Hosts::Any,
        (false, true) => {
            return Err(Refused::caller("--host and --allow-any-host together, expected one"));
        }
    };
    let nqn = arguments.nqn.clone().unwrap_or_else(|| NQN.to_owned());
    let refuse = |name: &str, why| Refused::caller(format!("`{name}`: {why}"));
    wire::nqn::check(&nqn).map_err(|why| refuse(&nqn, why))?;
    for name in &arguments.host {
        wire::nqn::check_host(name).map_err(|why| refuse(name, why))?;
    }
    let namespace = |(nsid, uri): (u32, &Uri)| configuration::Namespace {
        nsid,
        uri: uri.clone(),
        line: Line::default(),
        is_read_only: arguments.read_only,
        hosts: configuration::Hosts::Any,
        ana_group: 1,
    };
    let subsystem = configuration::Subsystem {
        nqn,
        line: Line::default(),
        serial: None,
        hosts,
        listeners: (0..listeners.len()).collect(),
        namespaces: (1..).zip(&arguments.uris).map(namespace).collect(),
        paths: Vec::new(),
    };
    let listener = |address| configuration::Listener { address, line: Line::default() };
    let asked = Configuration {
        memory_bytes: arguments.memory.map(std::num::NonZeroU64::get),
        memory_line: Line::default(),
        state: arguments.state.clone(),
        state_line: Line::default(),
        listeners: listeners.into_iter().map(listener).collect(),
        subsystems: vec![subsystem],
        referrals: Vec::new(),
        limits: limits::asked(arguments),
    };
    check_access(&asked, arguments.allow_any_host)?;
    Ok(asked)
}

/// Serves until somebody ends it.
pub(super) fn run(
    arguments: &ServeArguments,
    asked: Configuration,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let (sockets, placement) = sockets::of_server(&arguments.socket)?;
    let clock = Clock::start();
    let namespaces = asked.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
    let regions = regions_for(namespaces.map(|namespace| &namespace.uri), REGIONS_MAX);
    let limits = limits::limits(arguments, &asked).map_err(|unfit| placed(arguments, unfit))?;
    let service = Service::new(&regions, limits).map_err(|why| {
        let refused = Refused::machine(why);
        placed(arguments, Unfit { refused, line: asked.memory_line, key: "memory" })
    })?;
    name_discovery(&service, &asked)?;
    let state = open_state(&asked, &arguments.adopt_reservations)
        .map_err(|unfit| placed(arguments, unfit))?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let server = Server::start(ServerPlan {
        doors: Vec::new(),
        service: service.clone(),
        regions: regions.clone(),
        sockets,
        placement,
        reactors: Arc::clone(reactors.directory()),
        clock,
    });
    let server = server.map_err(|error| Refused::machine(format!("serve: {error}")))?;
    let devices = Devices::default();
    let hands = devices.clone();
    let world = World { service: service.clone(), server, regions, clock, state, devices };
    let mut standing = Standing::new(world);
    standing.apply(asked).map_err(|unfit| placed(arguments, unfit))?.all()?;
    let state = running::state_of(&balanced).with(Queues(service.clone())).with(hands);
    let mut asking = running::serve(state);
    host::file::keep()?;
    write_out(out, &ready(arguments.json, &standing))?;
    while !host::signal::interrupted() {
        if let Some(path) = &arguments.config
            && host::signal::reload_asked()
        {
            reload(path, &mut standing, announcer(&asking));
        }
        tell(&service, announcer(&asking));
        standing.hear();
        if let Some((_, relay)) = &mut asking {
            relay.pass_on(&running::of(reactors));
        }
        host::thread::rest(WATCH_INTERVAL);
    }
    end(clock, standing, balanced, &service)
}

/// Hosts know a discovery service by its name and its serial number: this machine's, at these addresses.
fn name_discovery(service: &Service, asked: &Configuration) -> Result<(), Refused> {
    let addresses: Vec<String> =
        asked.listeners.iter().map(|listener| listener.address.to_string()).collect();
    let (nqn, serial) = discovery_name(&addresses.join(","));
    service.name_discovery(DiscoveryName { nqn, serial }).map_err(Refused::machine)
}

/// The directory for what survives a loss of power, if there is to be one.
fn open_state(asked: &Configuration, adopted: &[String]) -> Result<Option<StateDirectory>, Unfit> {
    if asked.state.is_none() && !adopted.is_empty() {
        let text = "--adopt-reservations without a state directory, expected one";
        let refused =
            Refused::caller(text).with_hint("name it with --state, or `state` in the file");
        return Err(Unfit { refused, line: asked.state_line, key: "state" });
    }
    let opened = asked.state.as_deref().map(StateDirectory::open).transpose();
    let opened = opened.and_then(|state| state.map(|state| state.adopting(adopted)).transpose());
    let refuse =
        |why| Unfit { refused: Refused::machine(why), line: asked.state_line, key: "state" };
    opened.map_err(refuse)
}

/// Why something cannot be served, with its place if a file asks for it.
fn placed(arguments: &ServeArguments, unfit: Unfit) -> Refused {
    match &arguments.config {
        Some(path) => unfit.in_file(path),
        None => unfit.refused,
    }
}

/// Where those who follow events are told of them, if they can be.
fn announcer(asking: &Option<(control::Server, Relay)>) -> Option<&Announcer> {
    asking.as_ref().map(|(_, relay)| relay.announcer())
}

/// What lines about such news are limited by, if they are written: what peers cause as often as they like
/// keeps back nothing else.
const fn cause_of(news: &News) -> Option<&'static str> {
    match news {
        News::Refused { .. } => Some("refused"),
        News::Notice(_) => Some("notice"),
        News::Trouble(_) => Some("trouble"),
        News::Connected { .. } | News::Associated { .. } | News::Disconnected { .. } => None,
    }
}

/// Passes on what has happened.
fn tell(service: &Service, announcer: Option<&Announcer>) {
    while let Some(news) = service.next_news() {
        if let Some(cause) = cause_of(&news) {
            tracing::info!(cause, "{news}");
        }
        if let Some(announcer) = announcer {
            announcer.announce_host(&news);
        }
    }
}

/// Serves what the file says now, or goes on as before.
fn reload(path: &Path, standing: &mut Standing, announcer: Option<&Announcer>) {
    let read = read_configuration(path);
    let applied = read.and_then(|asked| standing.apply(asked).map_err(|unfit| unfit.in_file(path)));
    let shown = path.display().to_string();
    match &applied {
        Ok(changes) => {
            let done = match changes.done.is_empty() {
                true => "nothing has changed".to_owned(),
                false => changes.done.join("; "),
            };
            tracing::info!("{shown}: {done}");
            for failed in &changes.failed {
                tracing::warn!(cause = %failed, "{shown}: {failed}");
            }
        }
        Err(refused) => {
            let hint = refused.hint.as_ref().map_or_else(String::new, |hint| format!(" ({hint})"));
            tracing::warn!("nothing is changed: {}{hint}", refused.text);
        }
    }
    if let Some(announcer) = announcer {
        let applied = applied.map(|changes| [changes.done, changes.failed].concat());
        let applied = applied.as_deref().map_err(|refused| refused.text.as_str());
        announcer.announce_configuration(&shown, applied);
    }
}

/// Lets nobody in, has those who are in finish, and says what it has given up when that takes too long.
fn end(
    clock: Clock,
    standing: Standing,
    balanced: Balanced,
    service: &Service,
) -> Result<ExitCode, Refused> {
    let until = clock.now().after(END_MAX);
    let leave = move |_: &host::Stop| {
        // Nobody new first; then those who are in; then what they were served.
        let devices = standing.close();
        balanced.stop();
        drop(devices);
    };
    let leaving = Thread::spawn("ending", None, leave)
        .map_err(|error| Refused::machine(format!("end: {error}")))?;
    let mut is_whole = true;
    while !leaving.is_finished() && is_whole {
        host::thread::rest(END_INTERVAL);
        is_whole = clock.now() < until;
    }
    tell(service, None);
    if is_whole {
        leaving.join();
        return Ok(ExitCode::SUCCESS);
    }
    // It may never come back; the process goes all the same, and the thread with it.
    std::mem::forget(leaving);
    let connected = service.connected();
    Err(Refused::machine(format!(
        "end: {connected} connections and their devices are given up after {} s, expected them to \
         let go",
        END_MAX.ns / 1_000_000_000
    )))
}

/// Whoever can reach a listener beyond this machine has to be named, or let in on purpose.
fn check_access(asked: &Configuration, allows_any: bool) -> Result<(), Refused> {
    for subsystem in &asked.subsystems {
        let reached = subsystem.listeners.iter().filter_map(|at| asked.listeners.get(*at));
        let beyond = reached.map(|listener| listener.address).find(|at| !at.ip().is_loopback());
        if let Some(address) = beyond
            && subsystem.hosts == configuration::Hosts::Any
            && !allows_any
        {
            let text = format!(
                "serve {}: anybody who reaches {address} could read and write it, \
                 expected a list of hosts",
                subsystem.nqn
            );
            let hint = "name them with --host NQN, or say --allow-any-host";
            return Err(Refused { hint: Some(hint.to_owned()), ..Refused::caller(text) });
        }
    }
    Ok(())
}
