//! `tenmil proxy`: TCP proxy with fault injection.

use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_block::quantity_parser::{parse_size, parse_time};
use tenmil_linux::Clock;
use tenmil_rpc::ProcessParts;
use tenmil_sim::sim_network::{LinkFault, LinkFaults, LinkOptions};

use super::control_options::ControlOptions;
use super::perf::parse_integer;
use super::{rpc_endpoint, write_stdout};
use crate::proxy::{FaultProxy, ProxyConfig};

/// Arguments of `proxy`.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct ProxyArguments {
    /// Address to listen at, such as 127.0.0.1:0; port 0 picks a free port
    #[arg(value_name = "LISTEN")]
    listen: SocketAddr,

    /// Address to connect to: HOST:PORT
    #[arg(value_name = "TARGET")]
    target: String,

    /// Inject FAULT into each connection after this many bytes towards TARGET: 4k=cut; may be repeated
    #[arg(long, value_name = "BYTE=FAULT", value_parser = parse_fault)]
    to_server: Vec<(u64, LinkFault)>,

    /// The same for bytes towards the client
    #[arg(long, value_name = "BYTE=FAULT", value_parser = parse_fault)]
    to_client: Vec<(u64, LinkFault)>,

    /// Forward bytes in fragments of random length
    #[arg(long)]
    fragment: bool,

    /// One-way delay: 2ms
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_time)]
    delay: Span,

    /// Maximum random addition to the delay
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_time)]
    jitter: Span,

    /// Buffer size per direction: 1m
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = parse_buffer_size)]
    buffer: usize,

    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_integer::<u64>)]
    seed: u64,

    #[command(flatten)]
    control: ControlOptions,
}

const MORE: &str = "\
Faults: cut (both ends see a reset), close (the direction ends, what follows is discarded),
freeze:TIME, black-hole (what follows is discarded without notice), flip (one bit of the next
byte). The byte is counted from the start of each connection.
Runs until SIGTERM or Ctrl-C. Once it listens it prints one line: `ready` and the address; then one
for each connection that begins or ends.

Examples:
  tenmil proxy 127.0.0.1:0 127.0.0.1:4420 --delay 2ms --fragment
  tenmil proxy 127.0.0.1:4421 127.0.0.1:4420 --to-server 100k=cut
  tenmil proxy 127.0.0.1:4421 target.example:4420 --to-client 1m=freeze:3s --to-client 2m=black-hole";

/// Interval at which a signal to stop is checked.
const WATCH_INTERVAL: Span = Span::from_ms(50);

/// Forwards bytes until SIGTERM or Ctrl-C.
pub(super) fn run_proxy(
    arguments: &ProxyArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch SIGTERM: {error}")))?;
    arguments.control.prepare()?;
    let clock = Clock::start();
    let mut proxy = FaultProxy::new(arguments.proxy_config())?;
    let asked = rpc_endpoint::serve_control_socket(ProcessParts::new());
    rpc_endpoint::set_ready(&asked);
    write_stdout(out, &format!("ready {}\n", proxy.address()))?;
    while !tenmil_linux::signal::is_stop_requested() {
        let mut new_events = String::new();
        let moved =
            proxy.poll(clock.now(), &mut |line| new_events = format!("{new_events}{line}\n"));
        if !new_events.is_empty() {
            write_stdout(out, &new_events)?;
        }
        if !moved {
            let slept = proxy.wait_for_event(clock.now(), WATCH_INTERVAL);
            slept.map_err(|error| Error::environment(format!("wait for connections: {error}")))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl ProxyArguments {
    fn proxy_config(&self) -> ProxyConfig {
        let line = |faults: &[(u64, LinkFault)]| LinkOptions {
            splits: self.fragment,
            room_bytes: self.buffer,
            delay: self.delay,
            jitter: self.jitter,
            faults: faults
                .iter()
                .fold(LinkFaults::default(), |all, (at, fault)| all.with_fault(*at, *fault)),
        };
        ProxyConfig {
            listen: self.listen,
            target: self.target.clone(),
            there: line(&self.to_server),
            back: line(&self.to_client),
            seed: self.seed,
        }
    }
}

fn parse_fault(text: &str) -> Result<(u64, LinkFault), String> {
    let expected =
        "expected BYTE=FAULT, where FAULT is cut, close, freeze:TIME, black-hole or flip";
    let (at, fault) = text.split_once('=').ok_or_else(|| format!("`{text}`: {expected}"))?;
    // `parse_size` rejects zero, which is a valid byte offset.
    let at = if at == "0" { 0 } else { parse_size(at)? };
    let fault = match fault.split_once(':') {
        Some(("freeze", time)) => LinkFault::Freeze(parse_time(time)?),
        None if fault == "cut" => LinkFault::Cut,
        None if fault == "close" => LinkFault::Close,
        None if fault == "black-hole" => LinkFault::BlackHole,
        None if fault == "flip" => LinkFault::Flip(1),
        _ => return Err(format!("`{fault}` is no fault, {expected}")),
    };
    Ok((at, fault))
}

fn parse_buffer_size(text: &str) -> Result<usize, String> {
    let size = parse_size(text)?;
    match usize::try_from(size) {
        Ok(room) if room > 0 => Ok(room),
        _ => Err(format!("`{text}` is no buffer size, expected at least 1")),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_sim::sim_network::LinkFault;

    use super::parse_fault;

    #[test]
    fn fault_argument_is_parsed_and_an_unknown_one_lists_the_known() {
        assert_eq!(parse_fault("4k=cut"), Ok((4096, LinkFault::Cut)));
        assert_eq!(parse_fault("0=close"), Ok((0, LinkFault::Close)));
        let frozen = LinkFault::Freeze(Span::from_ms(20));
        assert_eq!(parse_fault("7=freeze:20ms"), Ok((7, frozen)));
        assert_eq!(parse_fault("7=black-hole"), Ok((7, LinkFault::BlackHole)));
        assert_eq!(parse_fault("7=flip"), Ok((7, LinkFault::Flip(1))));
        for text in ["cut", "7=melt", "7=cut:3s", "7=freeze", "x=cut", "7=freeze:soon"] {
            let refused = parse_fault(text).unwrap_err();
            assert!(refused.contains("expected"), "{text}: {refused}");
        }
    }
}
