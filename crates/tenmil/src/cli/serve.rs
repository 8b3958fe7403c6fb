//! `tenmil serve`.

mod fabrics;
mod guests;
mod listen;
mod over;
#[cfg(test)]
mod tests;
mod ublk;
mod vfu;
mod vhost;

use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use base::Span;
use block::uri::Uri;
use block::{Caps, Device, DeviceOptions, Limiter, MediumError, Opened, Opener, Rate};
use clap::Args;
use control::configuration::Configuration;
use control::{Devices, Exports};
use dma::Regions;
use host::stream::{Address, Door};
use host::{Clock, Cores};
use reactor::schedule::Options;
use reactor::{PollMode, ReactorOptions, Reactors};
use serde_json::json;
use target::nbd::{News, Plan, Served, ServedPlan, Server};

use super::perf::{at_least_one, named, some_bytes, whole};
use super::{running, write_out};
use crate::Refused;
use crate::balance::{Balance, Balanced, check_cores, check_rules, parse_rules};
use listen::{Listen, parse_listen};
use over::{Over, check_switches};

/// The arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct ServeArguments {
    /// What to serve: file:PATH, ram:1g, null:, and whatever stands on them. Over NVMe/TCP several:
    /// namespaces 1, 2, … of one subsystem
    #[arg(value_name = "URI", required_unless_present = "config", value_parser = parse_uri)]
    uris: Vec<Uri>,

    /// Where to listen: nbd:PATH or nbd://HOST:PORT for NBD clients, tcp://HOST:PORT for NVMe/TCP
    /// hosts, port 0 being any that is free, more than once for more; vfio-user:PATH for a virtual
    /// machine, or another driver, whose PCI device it will be, more than once for one such device for
    /// each URI; vhost-user:PATH for a virtual machine, as its virtio disk; ublk:N for this machine, as
    /// /dev/ublkbN
    #[arg(short = 'l', long, value_name = "ADDRESS", required_unless_present = "config")]
    #[arg(value_parser = parse_listen)]
    listen: Vec<Listen>,

    /// Serve what this file says over NVMe/TCP, and nothing else
    #[arg(long, value_name = "FILE", conflicts_with_all = ["uris", "listen", "nqn", "host", "allow_any_host", "read_only", "memory", "state"])]
    config: Option<PathBuf>,

    /// The subsystem's name, over NVMe/TCP [default: nqn.2026-01.org.tenmil:disk]
    #[arg(long, value_name = "NQN")]
    nqn: Option<String>,

    /// A host that may connect over NVMe/TCP; more than once for more. Without any, everybody who
    /// reaches a listener of this machine alone
    #[arg(long, value_name = "NQN")]
    host: Vec<String>,

    /// Let everybody connect over NVMe/TCP who reaches a listener, from wherever
    #[arg(long)]
    allow_any_host: bool,

    /// Memory for data on their way over NVMe/TCP [default: 256m]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    memory: Option<NonZeroU64>,

    /// Keep here what survives a loss of power, over NVMe/TCP: reservations that hosts want to persist.
    /// Without it none do
    #[arg(long, value_name = "DIRECTORY")]
    state: Option<PathBuf>,

    /// Take over reservations that are another disk's, or that do not say which disk's they are: those of
    /// this file of the state directory, as the message says that refuses them; more than once for more.
    /// They are those of the disk that is served now, from now on
    #[arg(long, value_name = "FILE")]
    adopt_reservations: Vec<String>,

    /// How sockets are made over NVMe/TCP, more than once for more: engine=io_uring, zero-copy=64k
    /// (or no), busy-poll=50us, congestion=bbr; gather=no and more=no go without a technique,
    /// placement=queue gives all that come by one receive queue to one core, placement=spread looks
    /// at neither queue nor core
    #[arg(long, value_name = "KEY=VALUE")]
    socket: Vec<String>,

    /// Let nobody write
    #[arg(short = 'r', long)]
    read_only: bool,

    /// Let NBD clients change the size of a file, where they know how
    #[arg(long, conflicts_with_all = ["read_only", "config"])]
    allow_resize: bool,

    /// Let NBD clients write that are not of this machine: NBD has no authentication, so everybody who
    /// reaches the listener could
    #[arg(long, conflicts_with_all = ["read_only", "config"])]
    allow_remote_write: bool,

    /// What clients call it, beside the empty name [default: the URI]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Let all clients together have so many requests per second
    #[arg(long, value_name = "IOPS", value_parser = at_least_one)]
    limit_iops: Option<NonZeroU64>,

    /// Let all clients together move so many bytes per second: 10m
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    limit_bytes: Option<NonZeroU64>,

    /// Connections at a time [default: 64 over NBD, 1100 over NVMe/TCP]
    #[arg(long, value_name = "N", value_parser = some_connections)]
    connections: Option<u32>,

    /// Connections of one address at a time: over NBD of every client, over NVMe/TCP of hosts that no
    /// subsystem names [default: half of --connections]
    #[arg(long, value_name = "N", value_parser = some_connections, conflicts_with = "config")]
    connections_per_address: Option<u32>,

    /// Connections of one host NQN at a time, over NVMe/TCP [default: half of --connections]
    #[arg(long, value_name = "N", value_parser = some_connections, conflicts_with = "config")]
    connections_per_host: Option<u32>,

    /// Disconnect NBD clients that have asked for nothing so long, such as 90s, 15m or 2h: some clients
    /// connect again by themselves, a mounted disk of Linux does not [default: never]
    #[arg(long, value_name = "TIME", value_parser = some_time, conflicts_with = "config")]
    nbd_idle_timeout: Option<Span>,

    /// Cores to serve on, a thread on each: 0,2-3 or 0x3 [default: the last one allowed]
    #[arg(short = 'c', long, value_name = "CORES", value_parser = Cores::parse)]
    cores: Option<Cores>,

    /// What a thread does when there is nothing to do: look for ever, look for a while and then
    /// sleep, or rest for three quarters of the usual latency first
    #[arg(long, value_name = "MODE", default_value = "adaptive")]
    #[arg(value_parser = named(PollMode::ALL.map(|mode| (mode.name(), mode))))]
    poll: PollMode,

    /// How connections are spread: each stays on its core, or those that do little gather on
    /// one: static, dynamic, or dynamic?period=500ms&load=20&core=80&busy=95&rest=5s&gather=0 with
    /// &isolated=2-3; `tenmil set scheduler` switches while it runs
    #[arg(long, value_name = "POLICY", default_value = "static", value_parser = parse_rules)]
    scheduler: Options,

    /// Choose how fast the serving threads' cores run, by their load; put back at the end
    #[arg(long)]
    governor: bool,

    /// End, as at SIGTERM, when the process ends that started this one
    #[arg(long)]
    with_parent: bool,

    /// Print what is printed when it listens as JSON
    #[arg(long)]
    json: bool,
}

const MORE: &str = "\
Serves until SIGTERM or Ctrl-C, and is gone 5 seconds later, whatever a device does. Once it listens
it prints one line: `ready` and the addresses.
A socket file is its owner's alone, replaces that of a server that has died, and goes at the end.

Examples:
  tenmil serve file:/var/tmp/disk --listen nbd:/tmp/disk.sock
      qemu-img convert 'nbd+unix:///?socket=/tmp/disk.sock' copy.img
  tenmil serve 'file:/var/tmp/disk?size=10g' -l nbd://127.0.0.1:0
      nbdinfo nbd://127.0.0.1:PORT, with the port that was printed
  tenmil serve ram:1g -l nbd:/tmp/a.sock -l nbd://127.0.0.1:10809 --cores 0,1
  tenmil serve file:/var/tmp/disk -l nbd:/tmp/disk.sock --read-only
  tenmil serve ram:1g --listen tcp://127.0.0.1:4420
      tenmil perf 'tcp://127.0.0.1:4420/nqn.2026-01.org.tenmil:disk?ns=1'
  tenmil serve ram:1g -l tcp://127.0.0.1:4420 --socket engine=io_uring --socket zero-copy=no
  tenmil serve file:/a file:/b -l tcp://0.0.0.0:4420 --host nqn.2014-08.org.example:client
  tenmil serve file:/var/tmp/disk --listen vfio-user:/tmp/disk.sock
      qemu-system-x86_64, its RAM a memfd with share=on, and the device vfio-user-pci at that socket
      tenmil perf vfio-user:/tmp/disk.sock; with --poll always its doorbells can be mapped
  tenmil serve file:/a file:/b -l vfio-user:/tmp/a.sock -l vfio-user:/tmp/b.sock
  tenmil serve file:/var/tmp/disk --listen vhost-user:/tmp/disk.sock --cores 2,3
      qemu-system-x86_64, its RAM a memfd with share=on, -chardev
      socket,id=disk,path=/tmp/disk.sock,reconnect=1 and -device vhost-user-blk-pci,chardev=disk
  sudo tenmil serve file:/var/tmp/disk --listen ublk:0 --cores 2,3
      mkfs.ext4 /dev/ublkb0; after kill -9 the same command goes on with it; docs/ublk.md
  tenmil serve --config /etc/tenmil/target.toml
      kill -HUP PID serves what the file says now, all of it or nothing; docs/target.md
  tenmil serve file:/var/tmp/disk -l nbd:/tmp/disk.sock --limit-iops 5000
      tenmil get connections; tenmil set export limit_iops=0
  tenmil serve 'file:/var/tmp/disk?size=10g' -l nbd:/tmp/disk.sock
      tenmil set export size_bytes=21474836480
  tenmil serve ram:1g -l nbd:/tmp/a.sock --cores 0-3 --scheduler dynamic?load=10 --governor
      tenmil get scheduler; tenmil top";

/// A number of connections: with none nobody would be served.
fn some_connections(text: &str) -> Result<u32, String> {
    match whole(text)? {
        0 => Err(format!("`{text}` is none, expected at least 1")),
        count => Ok(count),
    }
}

/// A time of a second at least: `90`, `90s`, `15m`, `2h`.
fn some_time(text: &str) -> Result<Span, String> {
    let (digits, seconds) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1),
        Some((at, 'm')) => (&text[..at], 60),
        Some((at, 'h')) => (&text[..at], 3600),
        _ => (text, 1),
    };
    let count = digits.parse::<u64>().ok().filter(|count| (1..=1_000_000).contains(count));
    count.map(|count| Span::from_secs(count * seconds)).ok_or_else(|| {
        format!("`{text}` is not a time, expected at least a second, such as 90s, 15m or 2h")
    })
}

/// NBD clients that may be connected at once.
const CLIENTS_MAX: u32 = 64;

/// How often it looks whether somebody wants it to end.
const WATCH_INTERVAL: Span = Span::from_ms(50);

/// Places for memory: a device takes a few for each channel, and so do those it stands on.
const REGIONS_MAX: usize = 1 << 16;

/// How long a stop may take: an orderly one has [its own limits](fabrics) below it, and a service
/// manager expects the process to be gone after five seconds.
const STOP_MAX: Span = Span::from_ms(4_800);
/// Exit code of a stop that a device did not let end.
const NOT_STOPPED: u8 = 3;

/// What is written when a stop takes longer.
fn not_stopped(arguments: &ServeArguments) -> String {
    let devices: Vec<String> = arguments.uris.iter().map(Uri::to_string).collect();
    let named = match (&arguments.config, devices.is_empty()) {
        (Some(path), _) => format!("the devices of {}", path.display()),
        (None, false) => devices.join(", "),
        (None, true) => "the devices".into(),
    };
    format!(
        "error: stop: {named}: a device has not completed its requests {:.1} s after the signal, \
         expected less; the process ends without them, as if it were killed\n",
        STOP_MAX.as_secs_f64()
    )
}

/// Serves until somebody ends it.
pub(super) fn run(arguments: &ServeArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    // Before anything exists that would have to be put away.
    serving_cores(arguments, &Cores::allowed())?;
    host::signal::catch_interrupts()
        .and_then(|()| host::signal::limit_stop(STOP_MAX, not_stopped(arguments), NOT_STOPPED))
        .map_err(|error| Refused::machine(format!("catch SIGTERM: {error}")))?;
    if arguments.with_parent {
        host::signal::end_with_parent()
            .map_err(|error| Refused::machine(format!("end with the parent process: {error}")))?;
    }
    if let Some(path) = &arguments.config {
        host::signal::catch_reload()
            .map_err(|error| Refused::machine(format!("catch SIGHUP: {error}")))?;
        check_switches(arguments, Over::NvmeTcp)?;
        return fabrics::run(arguments, read_configuration(path)?, out);
    }
    let (mut clients, mut hosts, mut sockets) = (Vec::new(), Vec::new(), Vec::new());
    let (mut disks, mut guests) = (Vec::new(), Vec::new());
    for listen in &arguments.listen {
        match listen {
            Listen::Nbd(address) => clients.push(address.clone()),
            Listen::NvmeTcp(address) => hosts.push(*address),
            Listen::VfioUser(path) => sockets.push(path.clone()),
            Listen::VhostUser(path) => guests.push(path.clone()),
            Listen::Ublk(place) => disks.push(*place),
        }
    }
    match disks.as_slice() {
        [] => {}
        [place] if arguments.listen.len() == 1 => {
            check_switches(arguments, Over::Ublk)?;
            return ublk::run(arguments, place, out);
        }
        _ => {
            return Err(Refused::caller(
                "listen as ublk: and elsewhere at once, expected one: each claims the device",
            ));
        }
    }
    match guests.as_slice() {
        [] => {}
        [socket] if arguments.listen.len() == 1 => {
            check_switches(arguments, Over::VhostUser)?;
            return vhost::run(arguments, socket, out);
        }
        _ => {
            return Err(Refused::caller(
                "listen for vhost-user and elsewhere at once, expected one: a guest has the disk",
            ));
        }
    }
    match (clients.is_empty(), hosts.is_empty(), sockets.as_slice()) {
        (true, true, [_, ..]) => {
            check_switches(arguments, Over::VfioUser)?;
            vfu::run(arguments, &sockets, out)
        }
        (_, _, [_, ..]) => Err(Refused::caller(
            "listen for vfio-user and for others at once, expected one: a client has the device",
        )),
        (true, false, []) => {
            check_switches(arguments, Over::NvmeTcp)?;
            fabrics::run(arguments, fabrics::asked(arguments, hosts)?, out)
        }
        (false, true, []) => {
            check_switches(arguments, Over::Nbd)?;
            let [uri] = arguments.uris.as_slice() else {
                return Err(Refused::caller(format!(
                    "serve {} devices over NBD, expected one: its clients have no way to choose",
                    arguments.uris.len()
                )));
            };
            run_nbd(arguments, uri, &clients, out)
        }
        _ => Err(Refused::caller(
            "listen for NBD and for NVMe/TCP at once, expected one: each claims the device",
        )),
    }
}

/// What a file says.
fn read_configuration(path: &Path) -> Result<Configuration, Refused> {
    let shown = path.display();
    let text = host::file::read_text(path)
        .map_err(|error| Refused::caller(format!("read {shown}: {error}")))?;
    let configuration = Configuration::parse(&text);
    configuration.map_err(|wrong| Refused::caller(format!("{shown}: {wrong}")))
}

/// Serves one device over NBD until somebody ends it.
fn run_nbd(
    arguments: &ServeArguments,
    uri: &Uri,
    listen: &[Address],
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    check_writers(arguments, listen)?;
    let clock = Clock::start();
    let regions = Regions::new(REGIONS_MAX);
    let opener = Opener { regions: &regions, clock, seed: 1, more: crate::KINDS };
    let uri = uri.clone();
    let asked = if arguments.read_only { uri.clone().to_read() } else { uri.clone() };
    let opened = opener.open(&asked).map_err(|error| Refused {
        blame: error.blame(),
        text: format!("open {error}"),
        hint: None,
    })?;
    let devices = Devices::new(opened.handles.clone());
    let served = Arc::new(offer(arguments, &uri, opened, &regions, clock)?);
    let doors = listen.iter().map(open_door).collect::<Result<Vec<_>, _>>()?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let state = running::state_of(&balanced);
    let state = state.with(Exports::new(vec![Arc::clone(&served)], clock)).with(devices);
    let mut asked = running::serve(state);
    let connections_max = arguments.connections.unwrap_or(CLIENTS_MAX);
    let server = Server::start(Plan {
        doors,
        served: Arc::clone(&served),
        regions: regions.clone(),
        reactors: Arc::clone(reactors.directory()),
        clock,
        connections_max: connections_max as usize,
        per_address_max: arguments.connections_per_address.map_or_else(
            || Plan::per_address_max_of(connections_max as usize),
            |most| most as usize,
        ),
        idle_max: arguments.nbd_idle_timeout,
    });
    let server = server.map_err(|error| Refused::machine(format!("serve: {error}")))?;
    host::file::keep()?;
    write_out(out, &ready(arguments, &served, &server))?;
    while !host::signal::interrupted() {
        while let Some(news) = server.next_news() {
            if let News::Trouble(text) = &news {
                tracing::info!("{text}");
            }
            if let Some((_, relay)) = &asked {
                relay.announcer().announce_export(served.export().name(), &news);
            }
        }
        if let Some((_, relay)) = &mut asked {
            relay.pass_on(&running::of(reactors));
        }
        host::thread::rest(WATCH_INTERVAL);
    }
    // Nobody new first; then those who are in, whose last answers are still sent.
    drop(server);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Refuses to let everybody write who reaches a listener, unless that was asked for.
fn check_writers(arguments: &ServeArguments, listen: &[Address]) -> Result<(), Refused> {
    let is_remote =
        |address: &&Address| matches!(address, Address::Tcp(at) if !at.ip().is_loopback());
    let Some(remote) = listen.iter().find(is_remote) else { return Ok(()) };
    if arguments.read_only || arguments.allow_remote_write {
        return Ok(());
    }
    let text = format!(
        "listen at {}: other machines could write there without authentication, expected an address of \
         loopback, --read-only or --allow-remote-write",
        as_typed(remote)
    );
    let hint = "Add --read-only, or --allow-remote-write if everybody who reaches it may write.";
    Err(Refused::caller(text).with_hint(hint))
}

/// Makes a device of what was opened, and holds it for those who connect.
fn offer(
    arguments: &ServeArguments,
    uri: &Uri,
    opened: Opened,
    regions: &Regions,
    clock: Clock,
) -> Result<Served, Refused> {
    let ServeArguments { name, read_only, allow_resize, limit_iops, limit_bytes, .. } = arguments;
    let uri = uri.to_string();
    let refuse = |why: MediumError| Refused::of(why.blame(), format!("serve {uri}: {why}"));
    let total = Rate { iops: *limit_iops, bytes: *limit_bytes };
    let limiter = Limiter::new(Caps { total, ..Caps::default() });
    let options = DeviceOptions { limiter: Some(limiter.clone()), ..DeviceOptions::new(clock, 1) };
    let device = Device::new(&uri, opened.medium, options).map_err(refuse)?;
    let plan = ServedPlan {
        name: name.clone().unwrap_or_else(|| uri.clone()),
        description: opened.description,
        uri: uri.clone(),
        device: &device,
        limiter: Some(limiter),
        is_read_only: *read_only,
        lets_resize: *allow_resize,
        regions,
    };
    Served::new(plan).map_err(refuse)
}

/// The cores to serve on, if they are ours and the scheduler's rules are about them.
fn serving_cores(arguments: &ServeArguments, allowed: &Cores) -> Result<Cores, Refused> {
    let last = || allowed.iter().last().into_iter().collect();
    let cores = arguments.cores.clone().unwrap_or_else(last);
    check_cores("-c", &cores, allowed)?;
    check_rules(&arguments.scheduler, &cores)?;
    Ok(cores)
}

/// Reactors, and what spreads connections over them, watches what the kernel leaves them, and governs
/// their cores where that is wanted.
fn start_reactors(arguments: &ServeArguments, clock: &Clock) -> Result<Balanced, Refused> {
    let cores = serving_cores(arguments, &Cores::allowed())?;
    let options = ReactorOptions { poll: arguments.poll, ..ReactorOptions::default() };
    let ServeArguments { scheduler, governor, .. } = arguments;
    let reactors = Reactors::start(&cores, &options, clock)
        .map_err(|why| Refused::of(why.blame(), why.to_string()))?;
    let tell = |text: String| tracing::info!("{text}");
    let balance = Balance::start(scheduler, *governor, reactors.directory(), &cores, &tell)?;
    Ok(Balanced { reactors, balance })
}

fn open_door(address: &Address) -> Result<Door, Refused> {
    Door::open(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            Refused::caller(format!("listen at {address}: somebody listens there already"))
        }
        io::ErrorKind::AlreadyExists => Refused::caller(format!(
            "listen at {address}: a file lies there that is no socket, expected none"
        )),
        io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => {
            Refused::caller(format!("listen at {address}: {error}"))
        }
        _ => Refused::machine(format!("listen at {address}: {error}")),
    })
}

/// What is printed once it listens.
fn ready(arguments: &ServeArguments, served: &Served, server: &Server) -> String {
    let listens: Vec<String> = server.addresses().iter().map(as_typed).collect();
    if !arguments.json {
        return format!("ready {}\n", listens.join(" "));
    }
    let export = served.export();
    let line = json!({
        "ready": true,
        "listen": listens,
        "connect": server.addresses().iter().map(for_clients).collect::<Vec<_>>(),
        "uri": served.uri(),
        "name": export.name(),
        "description": export.description(),
        "size_bytes": export.size_bytes(),
        "block_size": export.block_size(),
        "read_only": export.is_read_only(),
    });
    format!("{line}\n")
}

/// An address as `--listen` takes it.
fn as_typed(address: &Address) -> String {
    match address {
        Address::Path(path) => format!("nbd:{}", path.display()),
        Address::Tcp(port) => format!("nbd://{port}"),
    }
}

/// An address as clients take it.
fn for_clients(address: &Address) -> String {
    match address {
        Address::Path(path) => format!("nbd+unix:///?socket={}", path.display()),
        Address::Tcp(port) => format!("nbd://{port}"),
    }
}

fn parse_uri(text: &str) -> Result<Uri, String> {
    text.parse::<Uri>().map_err(|error| error.to_string())
}
