//! `tenmil proxy`.

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;

use base::Span;
use block::quantity::{parse_size, parse_time};
use clap::Args;
use control::State;
use host::Clock;
use sim::network::{Fault, Faults, LineOptions};

use super::perf::whole;
use super::{running, write_out};
use crate::Refused;
use crate::proxy::{Proxy, ProxyPlan};

/// The arguments of `proxy`.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct ProxyArguments {
    /// Where to listen: 127.0.0.1:0, port 0 being any that is free
    #[arg(value_name = "LISTEN")]
    listen: SocketAddr,

    /// Where to connect to: HOST:PORT
    #[arg(value_name = "TARGET")]
    target: String,

    /// Do FAULT to each connection when so many bytes have passed towards TARGET: 4k=cut; more than
    /// once for more
    #[arg(long, value_name = "BYTE=FAULT", value_parser = parse_fault)]
    there: Vec<(u64, Fault)>,

    /// The same towards whoever connected
    #[arg(long, value_name = "BYTE=FAULT", value_parser = parse_fault)]
    back: Vec<(u64, Fault)>,

    /// Pass bytes on in pieces of any length
    #[arg(long)]
    split: bool,

    /// Let everything take so long each way: 2ms
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_time)]
    delay: Span,

    /// And up to so much longer
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_time)]
    jitter: Span,

    /// Hold so much each way: 1m
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = parse_room)]
    room: usize,

    /// What all random numbers are made from
    #[arg(long, value_name = "N", default_value = "1", value_parser = whole::<u64>)]
    seed: u64,
}

const MORE: &str = "\
Faults: cut (both ends see a reset), close (the direction ends, what follows is swallowed),
freeze:TIME, black-hole (what follows is swallowed and nobody is told), flip (one bit of the next
byte). The byte is counted from the start of each connection.
Runs until SIGTERM or Ctrl-C. Once it listens it prints one line: `ready` and the address; then one
for each connection that begins or ends.

Examples:
  tenmil proxy 127.0.0.1:0 127.0.0.1:4420 --delay 2ms --split
  tenmil proxy 127.0.0.1:4421 127.0.0.1:4420 --there 100k=cut
  tenmil proxy 127.0.0.1:4421 target.example:4420 --back 1m=freeze:3s --back 2m=black-hole";

/// How often it looks whether somebody wants it to end.
const WATCH_INTERVAL: Span = Span::from_ms(50);

/// Passes bytes on until somebody ends it.
pub(super) fn run(arguments: &ProxyArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch SIGTERM: {error}")))?;
    let clock = Clock::start();
    let mut proxy = Proxy::new(arguments.plan())?;
    let _asked = running::serve(State::new());
    write_out(out, &format!("ready {}\n", proxy.address()))?;
    while !host::signal::interrupted() {
        let mut news = String::new();
        let moved = proxy.turn(clock.now(), &mut |line| news = format!("{news}{line}\n"));
        if !news.is_empty() {
            write_out(out, &news)?;
        }
        if !moved {
            let slept = proxy.sleep(clock.now(), WATCH_INTERVAL);
            slept.map_err(|error| Refused::machine(format!("wait for connections: {error}")))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl ProxyArguments {
    fn plan(&self) -> ProxyPlan {
        let line = |faults: &[(u64, Fault)]| LineOptions {
            splits: self.split,
            room_bytes: self.room,
            delay: self.delay,
            jitter: self.jitter,
            faults: faults.iter().fold(Faults::default(), |all, (at, fault)| all.and(*at, *fault)),
        };
        ProxyPlan {
            listen: self.listen,
            target: self.target.clone(),
            there: line(&self.there),
            back: line(&self.back),
            seed: self.seed,
        }
    }
}

fn parse_fault(text: &str) -> Result<(u64, Fault), String> {
    let expected =
        "expected BYTE=FAULT, where FAULT is cut, close, freeze:TIME, black-hole or flip";
    let (at, fault) = text.split_once('=').ok_or_else(|| format!("`{text}`: {expected}"))?;
    // A size says that it cannot be zero; a byte can.
    let at = if at == "0" { 0 } else { parse_size(at)? };
    let fault = match fault.split_once(':') {
        Some(("freeze", time)) => Fault::Freeze(parse_time(time)?),
        None if fault == "cut" => Fault::Cut,
        None if fault == "close" => Fault::Close,
        None if fault == "black-hole" => Fault::BlackHole,
        None if fault == "flip" => Fault::Flip(1),
        _ => return Err(format!("`{fault}` is no fault, {expected}")),
    };
    Ok((at, fault))
}

fn parse_room(text: &str) -> Result<usize, String> {
    let size = parse_size(text)?;
    match usize::try_from(size) {
        Ok(room) if room > 0 => Ok(room),
        _ => Err(format!("`{text}` is no room, expected at least 1")),
    }
}

#[cfg(test)]
mod tests {
    use base::Span;
    use sim::network::Fault;

    use super::parse_fault;

    #[test]
    fn a_fault_is_read_and_what_is_none_is_refused_with_those_there_are() {
        assert_eq!(parse_fault("4k=cut"), Ok((4096, Fault::Cut)));
        assert_eq!(parse_fault("0=close"), Ok((0, Fault::Close)));
        let frozen = Fault::Freeze(Span::from_ms(20));
        assert_eq!(parse_fault("7=freeze:20ms"), Ok((7, frozen)));
        assert_eq!(parse_fault("7=black-hole"), Ok((7, Fault::BlackHole)));
        assert_eq!(parse_fault("7=flip"), Ok((7, Fault::Flip(1))));
        for text in ["cut", "7=melt", "7=cut:3s", "7=freeze", "x=cut", "7=freeze:soon"] {
            let refused = parse_fault(text).unwrap_err();
            assert!(refused.contains("expected"), "{text}: {refused}");
        }
    }
}
