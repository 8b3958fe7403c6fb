//! `tenmil serve`: exports block devices over NBD, NVMe/TCP, vfio-user, vhost-user or ublk.

mod endpoint_devices;
mod event_log;
mod listen_address;
mod nbd;
mod nvme_tcp;
mod sandbox;
mod service_manager;
mod socket_options;
#[cfg(test)]
mod tests;
mod transport;
mod ublk;
mod vfio_user;
mod vhost_user;

use std::io::{self, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_block::quantity_parser::parse_time;
use tenmil_block::uri::Uri;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::flight_recorder::{self, FlightEventKind};
use tenmil_reactor::thread_scheduler::Options;
use tenmil_reactor::{PollMode, ReactorError, ReactorOptions, Reactors, StallReport};
use tenmil_rpc::target_config::{NbdListener, TargetConfig};
use tenmil_rpc::{EventRelay, EventSender, RpcServer, parse_slow_io};
use tenmil_serve::SlowIoLog;

use crate::flight_record;

use super::control_options::ControlOptions;
use super::perf::{named_value_parser, parse_integer, parse_nonzero, parse_nonzero_bytes};
use listen_address::{TransportAddress, parse_listen};
use nvme_tcp::ConfigWithText;
use sandbox::SandboxMode;
use tenmil_bench::balance::{
    BalancedReactors, BalancerGuard, check_cores_allowed, check_rule_cores_scheduled,
    parse_scheduler_rules,
};
use transport::{ServeTransport, check_transport_options};

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct ServeArguments {
    /// Block devices to export: file:PATH, ram:1g, null:, or a device stacked on them. Over NVMe/TCP
    /// each is a namespace (1, 2, …) of one subsystem
    #[arg(value_name = "URI", required_unless_present = "config", value_parser = parse_uri)]
    uris: Vec<Uri>,

    /// Listen address, may be repeated: nbd:PATH or nbd://HOST:PORT for NBD clients, nbds:PATH or
    /// nbds://HOST:PORT for those with TLS only; tcp://HOST:PORT
    /// for NVMe/TCP hosts (port 0 picks a free port); vfio-user:PATH for a PCI NVMe controller of a
    /// virtual machine or another driver, one for all URIs or one for each; vhost-user:PATH for a
    /// virtio disk of a virtual machine; ublk:N for /dev/ublkbN of this machine
    #[arg(short = 'l', long, value_name = "ADDRESS", required_unless_present = "config")]
    #[arg(value_parser = parse_listen)]
    listen: Vec<TransportAddress>,

    /// Configuration file of an NVMe/TCP target; excludes the options that it covers
    #[arg(long, value_name = "FILE", conflicts_with_all = ["uris", "listen", "nqn", "allowed_host", "allow_any_host", "read_only", "buffer_memory", "state_dir"])]
    config: Option<PathBuf>,

    /// Subsystem NQN, over NVMe/TCP [default: nqn.2026-01.org.tenmil:disk]
    #[arg(long, value_name = "NQN")]
    nqn: Option<String>,

    /// Host NQN that may connect over NVMe/TCP, may be repeated. Without any, every host may connect,
    /// through loopback listeners only
    #[arg(long, value_name = "NQN")]
    allowed_host: Vec<String>,

    /// Allow any host to connect over NVMe/TCP through any listener
    #[arg(long)]
    allow_any_host: bool,

    /// TLS of NVMe/TCP listeners: required, allowed (TLS or plaintext), off
    #[arg(long, value_name = "WHEN", default_value = "off", conflicts_with = "config")]
    tls: TlsArgument,

    /// Key of the allowed hosts for TLS, by its name in the keyring, or .nvme for all of theirs in the
    /// kernel's keyring of that name; may be repeated, for rotation
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    psk: Vec<String>,

    /// DH-HMAC-CHAP secret with which the allowed hosts must authenticate, by its name in the keyring; may
    /// be repeated, for rotation
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    dhchap: Vec<String>,

    /// DH-HMAC-CHAP secret with which this target proves its identity to hosts that ask for it, by its
    /// name in the keyring
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    dhchap_controller: Option<String>,

    /// Directory of the keys [default: $TENMIL_KEYRING, else /etc/tenmil/keys for root and
    /// ~/.config/tenmil/keys for other users]
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "config")]
    keyring: Option<PathBuf>,

    /// Memory for data buffers of NVMe/TCP connections [default: 256m]
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    buffer_memory: Option<NonZeroU64>,

    /// State directory for data that persist across power loss, over NVMe/TCP: persistent reservations
    /// (PTPL). Without it, hosts cannot make reservations persist
    #[arg(long, value_name = "DIRECTORY")]
    state_dir: Option<PathBuf>,

    /// Adopt the reservations in this file of the state directory, which belong to another disk or name
    /// none, for the disk served now; the error that rejects them names the file; may be repeated
    #[arg(long, value_name = "FILE")]
    adopt_reservations: Vec<String>,

    /// Socket options of NVMe/TCP, may be repeated: engine=io_uring, zero-copy=64k (or no),
    /// busy-poll=50us, congestion-control=bbr; batch-send=no and msg-more=no disable batched sends and MSG_MORE;
    /// placement=queue puts connections of one receive queue on one core, placement=spread ignores
    /// queue and core
    #[arg(long, value_name = "KEY=VALUE")]
    socket: Vec<String>,

    /// Export read-only
    #[arg(short = 'r', long)]
    read_only: bool,

    /// Allow NBD clients to resize a file (NBD_CMD_RESIZE)
    #[arg(long, conflicts_with_all = ["read_only", "config"])]
    allow_resize: bool,

    /// Allow writes by NBD clients of other machines: NBD has no authentication, so any client that can
    /// reach the listener may write
    #[arg(long, conflicts_with_all = ["read_only", "config"])]
    allow_remote_write: bool,

    /// Export name, besides the empty name [default: the URI]
    #[arg(long, value_name = "NAME")]
    export_name: Option<String>,

    /// Limit requests per second of each device, all clients together (QoS)
    #[arg(long, value_name = "IOPS", value_parser = parse_nonzero, conflicts_with = "config")]
    limit_iops: Option<NonZeroU64>,

    /// Limit bytes per second of each device, all clients together (QoS): 10m
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes, conflicts_with = "config")]
    limit_bytes: Option<NonZeroU64>,

    /// Maximum number of connections [default: 64 over NBD, 1100 over NVMe/TCP]
    #[arg(long, value_name = "N", value_parser = parse_connection_count)]
    max_connections: Option<u32>,

    /// Maximum number of connections per client address: over NBD of all clients, over NVMe/TCP of
    /// hosts that no subsystem names [default: half of --max-connections]
    #[arg(long, value_name = "N", value_parser = parse_connection_count, conflicts_with = "config")]
    connections_per_address: Option<u32>,

    /// Maximum number of connections per host NQN, over NVMe/TCP [default: half of --max-connections]
    #[arg(long, value_name = "N", value_parser = parse_connection_count, conflicts_with = "config")]
    connections_per_host: Option<u32>,

    /// Disconnect NBD clients that have asked for nothing so long, such as 90s, 15m or 2h: some clients
    /// connect again by themselves, a mounted disk of Linux does not [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, conflicts_with = "config")]
    nbd_idle_timeout: Option<Span>,

    #[command(flatten)]
    nbd_tls: nbd::NbdTlsArguments,

    /// Cores to serve on, a thread on each: 0,2-3 or 0x3 [default: the last one allowed]
    #[arg(short = 'c', long, value_name = "CORES", value_parser = CpuList::parse)]
    cores: Option<CpuList>,

    /// Polling mode of an idle thread: poll continuously; poll briefly, then sleep; or sleep for three
    /// quarters of the usual latency, then poll
    #[arg(long, value_name = "MODE", default_value = "adaptive")]
    #[arg(value_parser = named_value_parser(PollMode::ALL.map(|mode| (mode.name(), mode))))]
    poll: PollMode,

    /// Placement of connections: fixed cores (static), or lightly loaded connections consolidated on
    /// one core (dynamic): static, dynamic, or
    /// dynamic?period=500ms&load=20&core=80&busy=95&migration-interval=5s&scheduling-core=0
    /// with &isolated=2-3; `tenmil set scheduler` changes it at run time
    #[arg(long, value_name = "POLICY", default_value = "static", value_parser = parse_scheduler_rules)]
    scheduler: Options,

    /// Scale the frequency of the serving cores with their load; restored at the end
    #[arg(long)]
    governor: bool,

    /// Log commands that take this long from reception to completion, with the times of their stages;
    /// `tenmil set slow_io` changes it at run time
    #[arg(long, value_name = "TIME", value_parser = parse_slow_io_time, conflicts_with = "config")]
    slow_io: Option<Span>,

    /// Report a reactor whose iteration lasts longer than this: what runs, for how long, and its stack
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_stall_time)]
    stall_time: Span,

    /// Rights that the server drops once it serves: `on` drops capabilities and restricts system calls
    /// (seccomp) and paths (Landlock), as far as the kernel can; `report` denies nothing, and the kernel
    /// logs the system calls that `on` would deny; `off` drops nothing
    #[arg(long, value_name = "MODE", default_value = "on")]
    #[arg(value_parser = named_value_parser(SandboxMode::ALL))]
    sandbox: SandboxMode,

    /// File or directory that the server may open later, for reading and writing, besides what it has
    /// open; may be repeated. Without any, a server that can get new devices may open all but system
    /// directories
    #[arg(long, value_name = "PATH")]
    sandbox_path: Vec<PathBuf>,

    /// User to run as, once devices are open and ports are bound; only root may. Files and sockets
    /// that the server has created belong to that user
    #[arg(long, value_name = "NAME[:GROUP]")]
    user: Option<String>,

    /// Exit, as on SIGTERM, when the parent process exits
    #[arg(long)]
    exit_with_parent: bool,

    /// Print the ready message as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    control: ControlOptions,
}

/// Whether connections use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TlsArgument {
    /// Plaintext only
    Off,
    /// TLS or plaintext; the first byte of a connection decides
    Allowed,
    /// TLS only
    Required,
}

const MORE: &str = "\
Serves until SIGTERM or Ctrl-C, and exits within 5 seconds, whatever a device does. Once it listens
it prints one line: `ready` and the addresses.
A socket file is its owner's alone, replaces that of a server that has died, and goes at the end.

Examples:
  tenmil serve /var/tmp/disk --listen nbd:/tmp/disk.sock
      qemu-img convert 'nbd+unix:///?socket=/tmp/disk.sock' copy.img
  tenmil serve 'file:/var/tmp/disk?size=10g' -l nbd://127.0.0.1:0
      nbdinfo nbd://127.0.0.1:34567                    with the port that was printed
  tenmil serve ram:1g -l nbd:/tmp/a.sock -l nbd://127.0.0.1:10809 --cores 0,1
  tenmil serve /var/tmp/disk -l nbd:/tmp/disk.sock --read-only
  tenmil serve ram:1g -l tcp://127.0.0.1:4420 -l nbd:/tmp/disk.sock
      nbdinfo --list 'nbd+unix:///?socket=/tmp/disk.sock'
  tenmil serve ram:1g --listen tcp://127.0.0.1:4420
      tenmil perf tcp://127.0.0.1/nqn.2026-01.org.tenmil:disk/1
  tenmil serve ram:1g -l tcp://127.0.0.1:4420 --socket engine=io_uring --socket zero-copy=no
  tenmil serve /dev/sda /dev/sdb -l tcp://0.0.0.0:4420 --allowed-host nqn.2014-08.org.example:client
  tenmil serve /dev/sda -l tcp://0.0.0.0:4420 --allowed-host nqn.2026-01.example:db --dhchap db
  tenmil serve /var/tmp/disk --listen vfio-user:/tmp/disk.sock
      qemu-system-x86_64                               its RAM a memfd with share=on, and the
                                                       device vfio-user-pci at that socket
      tenmil perf vfio-user:/tmp/disk.sock             with --poll always its doorbells are mapped
  tenmil serve /dev/sda /dev/sdb -l vfio-user:/tmp/a.sock -l vfio-user:/tmp/b.sock
  tenmil serve /var/tmp/disk --listen vhost-user:/tmp/disk.sock --cores 2,3
      qemu-system-x86_64                               its RAM a memfd with share=on, -chardev
                                                       socket,id=disk,path=/tmp/disk.sock and
                                                       -device vhost-user-blk-pci,chardev=disk
  sudo tenmil serve /dev/sda -l tcp://127.0.0.1:4420 --user tenmil
      tenmil get sandbox                               shows the rights that are left
  sudo tenmil serve /var/tmp/disk --listen ublk:0 --cores 2,3
      mkfs.ext4 /dev/ublkb0                            a restart after kill -9 keeps the device
  tenmil serve --config /etc/tenmil/target.toml
      tenmil reload                                    applies the file, or rejects all of it
      tenmil namespace create nqn.2026-01.org.example:disks /dev/sdc
  tenmil serve /var/tmp/disk -l nbd:/tmp/disk.sock --limit-iops 5000
      tenmil set export_limits iops=0
  tenmil serve /dev/sda -l tcp://127.0.0.1:4420 --limit-bytes 500m
      tenmil set host_limits iops=20000 burst_ms=2000  docs/operator/limits.md
  tenmil serve 'file:/var/tmp/disk?size=10g' -l nbd:/tmp/disk.sock
      tenmil set export size_bytes=21474836480
  tenmil serve /var/tmp/pool/db -l nbd:/tmp/db.sock    volume db of pool /var/tmp/pool
  tenmil serve ram:1g -l nbd:/tmp/a.sock --cores 0-3 --scheduler 'dynamic?load=10' --governor
      tenmil get scheduler
  tenmil serve /dev/sda -l tcp://127.0.0.1:4420 --slow-io 10ms
      tenmil get flight_recorder

docs/operator/ublk.md, docs/operator/nvme-tcp-target.md and docs/user/device-uris.md describe the details.";

/// Parses a number of connections, which must not be zero.
fn parse_connection_count(text: &str) -> Result<u32, String> {
    match parse_integer(text)? {
        0 => Err(format!("`{text}` is none, expected at least 1")),
        count => Ok(count),
    }
}

/// A threshold for slow commands.
fn parse_slow_io_time(text: &str) -> Result<Span, String> {
    parse_slow_io(text)?
        .ok_or_else(|| "`off` is the default, expected a time such as 10ms".to_owned())
}

/// A time of 10 ms at least: `250ms`, `2s`.
fn parse_stall_time(text: &str) -> Result<Span, String> {
    let time = parse_time(text)?;
    let is_permitted = time >= Span::from_ms(10);
    is_permitted.then_some(time).ok_or_else(|| format!("`{text}`: expected at least 10ms"))
}

/// A time of a second at least: `90`, `90s`, `15m`, `2h`.
fn parse_timeout(text: &str) -> Result<Span, String> {
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

/// Interval at which signals and events are checked.
const WATCH_INTERVAL: Span = Span::from_ms(50);

/// Capacity of the DMA region table: a device and each device below it use a few entries per channel.
const REGIONS_MAX: usize = 1 << 16;

/// Time limit of a shutdown. An orderly shutdown has lower limits; a service manager expects
/// the process to end within five seconds.
const STOP_MAX: Span = Span::from_ms(4_800);
/// Exit code of a shutdown that a device prevented from completing.
const NOT_STOPPED: u8 = 3;

/// The error message of a shutdown that exceeds its time limit.
fn stop_timeout_error(arguments: &ServeArguments) -> String {
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

/// Serves until SIGTERM or Ctrl-C.
pub(super) fn run_serve(
    arguments: &ServeArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    // Argument errors are reported before any file, socket or thread is created.
    serving_cores(arguments, &CpuList::allowed_cpus())?;
    sandbox::check_user(arguments)?;
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .and_then(|()| {
            tenmil_linux::signal::limit_stop_time(
                STOP_MAX,
                stop_timeout_error(arguments),
                NOT_STOPPED,
            )
        })
        .map_err(|error| Error::environment(format!("catch SIGTERM: {error}")))?;
    service_manager::connect()?;
    if arguments.exit_with_parent {
        tenmil_linux::signal::end_with_parent()
            .map_err(|error| Error::environment(format!("end with the parent process: {error}")))?;
    }
    // Also without a file: `kill -HUP $(pidof tenmil)` reaches every server of the machine.
    tenmil_linux::signal::request_reload_on_sighup()
        .map_err(|error| Error::environment(format!("catch SIGHUP: {error}")))?;
    arguments.control.or_from_environment().prepare()?;
    if let Some(path) = &arguments.config {
        check_transport_options(arguments, &[ServeTransport::NvmeTcp])?;
        return nvme_tcp::serve_nvme_tcp(arguments, read_configuration(path)?, out);
    }
    let (mut clients, mut hosts, mut sockets) = (Vec::new(), Vec::new(), Vec::new());
    let (mut disks, mut guests) = (Vec::new(), Vec::new());
    for listen in &arguments.listen {
        match listen {
            TransportAddress::Nbd(address) => clients.push((address.clone(), false)),
            TransportAddress::NbdOverTls(address) => clients.push((address.clone(), true)),
            TransportAddress::NvmeTcp(address) => hosts.push(*address),
            TransportAddress::VfioUser(path) => sockets.push(path.clone()),
            TransportAddress::VhostUser(path) => guests.push(path.clone()),
            TransportAddress::Ublk(place) => disks.push(*place),
        }
    }
    // ublk, vhost-user and vfio-user claim the device exclusively, so each excludes other transports.
    match disks.as_slice() {
        [] => {}
        [place] if arguments.listen.len() == 1 => {
            check_transport_options(arguments, &[ServeTransport::Ublk])?;
            return ublk::serve_ublk(arguments, place, out);
        }
        _ => {
            return Err(Error::usage(
                "listen as ublk: and elsewhere at once, expected one: each claims the device",
            ));
        }
    }
    match guests.as_slice() {
        [] => {}
        [socket] if arguments.listen.len() == 1 => {
            check_transport_options(arguments, &[ServeTransport::VhostUser])?;
            return vhost_user::serve_vhost_user(arguments, socket, out);
        }
        _ => {
            return Err(Error::usage(
                "listen for vhost-user and elsewhere at once, expected one: a virtual machine has the disk",
            ));
        }
    }
    match (clients.is_empty(), hosts.is_empty(), sockets.as_slice()) {
        (true, true, [_, ..]) => {
            check_transport_options(arguments, &[ServeTransport::VfioUser])?;
            vfio_user::serve_vfio_user(arguments, &sockets, out)
        }
        (_, _, [_, ..]) => Err(Error::usage(
            "listen for vfio-user and for others at once, expected one: a client has the device",
        )),
        (has_no_clients, has_no_hosts, []) => {
            let over = match (has_no_clients, has_no_hosts) {
                (true, _) => &[ServeTransport::NvmeTcp][..],
                (false, true) => &[ServeTransport::Nbd],
                (false, false) => &[ServeTransport::NvmeTcp, ServeTransport::Nbd],
            };
            check_transport_options(arguments, over)?;
            let is_limited = arguments.limit_iops.is_some() || arguments.limit_bytes.is_some();
            if is_limited && over.len() > 1 {
                let text = "limits of devices over NVMe/TCP and NBD at once, expected one protocol: \
                            each would have limits of its own";
                let hint =
                    "give `limits` of the namespaces and of the exports in a configuration file";
                return Err(Error::usage(text).with_hint(hint));
            }
            nbd::check_writable_export_is_local(arguments, &clients)?;
            let clients: Vec<NbdListener> = clients
                .into_iter()
                .map(|(address, requires_tls)| NbdListener { address, requires_tls })
                .collect();
            let config = nvme_tcp::config_from_arguments(arguments, hosts, &clients)?;
            nvme_tcp::serve_nvme_tcp(arguments, config.into(), out)
        }
    }
}

/// Reads and parses the configuration file.
fn read_configuration(path: &Path) -> Result<ConfigWithText, Error> {
    let shown = path.display();
    let text = tenmil_linux::storage_file::read_text(path)
        .map_err(|error| Error::usage(format!("read {shown}: {error}")))?;
    let config =
        TargetConfig::parse(&text).map_err(|wrong| Error::usage(format!("{shown}: {wrong}")))?;
    Ok(ConfigWithText { config, text })
}

/// The cores to serve on, checked against the allowed cores and the scheduler's options.
fn serving_cores(arguments: &ServeArguments, allowed: &CpuList) -> Result<CpuList, Error> {
    let last = || allowed.iter().last().into_iter().collect();
    let cores = arguments.cores.clone().unwrap_or_else(last);
    check_cores_allowed("-c", &cores, allowed)?;
    check_rule_cores_scheduled(&arguments.scheduler, &cores)?;
    Ok(cores)
}

/// Starts the reactors and their balancer, which places connections, follows CPU affinity changes and
/// optionally scales core frequencies.
fn start_reactors(arguments: &ServeArguments, clock: &Clock) -> Result<BalancedReactors, Error> {
    let cores = serving_cores(arguments, &CpuList::allowed_cpus())?;
    let options = ReactorOptions { poll: arguments.poll, ..ReactorOptions::default() };
    let ServeArguments { scheduler, governor, .. } = arguments;
    let refuse = |why: ReactorError| Error::new(why.category(), why.to_string());
    let mut reactors = Reactors::start_on_cores(&cores, &options, clock).map_err(refuse)?;
    reactors.start_watchdog(arguments.stall_time, log_stall).map_err(refuse)?;
    let tell = |text: String| tracing::info!("{text}");
    let balance =
        BalancerGuard::start_balancer(scheduler, *governor, reactors.registry(), &cores, &tell)?;
    Ok(BalancedReactors { reactors, balance })
}

/// Logs slow commands and sends their events.
fn log_slow_io(log: &SlowIoLog, announcer: Option<&EventSender>) {
    while let Some(slow) = log.next_command() {
        tracing::warn!(cause = %slow.source.export, event = "slow-io", "{slow}");
        if let Some(announcer) = announcer {
            announcer.emit_slow_io(&slow);
        }
    }
    let dropped = log.take_dropped();
    if dropped > 0 {
        tracing::warn!("slow I/O: {dropped} more commands were slow and are not logged");
        flight_recorder::record_now(FlightEventKind::SlowIoDropped, [dropped, 0]);
        if let Some(announcer) = announcer {
            announcer.emit_slow_io_dropped(dropped);
        }
    }
}

/// Logs a stalled reactor, and writes the flight recorder to a file.
fn log_stall(stall: &StallReport) {
    let recorded = flight_record::log_line(flight_record::write_flight_record(&stall.to_string()));
    let recorded = recorded.map_or_else(String::new, |line| format!("; {line}"));
    tracing::error!(cause = %stall.reactor, event = "reactor-stalled", "{stall}{recorded}");
}

/// The sender for events of RPC clients, if the control socket exists.
fn event_sender(endpoint: &Option<(RpcServer, EventRelay)>) -> Option<&EventSender> {
    endpoint.as_ref().map(|(_, relay)| relay.event_sender())
}

fn open_listener(address: &ListenAddress) -> Result<StreamListener, Error> {
    StreamListener::open(address).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied if sandbox::has_dropped_rights() => {
            Error::environment(format!("listen at {address}: {error}")).with_hint(
                "the server dropped its rights at start: restart it with this address, or with \
                 --sandbox=off",
            )
        }
        io::ErrorKind::AddrInUse => {
            Error::usage(format!("listen at {address}: the address is in use"))
        }
        io::ErrorKind::AlreadyExists => Error::usage(format!(
            "listen at {address}: a file lies there that is no socket, expected none"
        )),
        io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => {
            Error::usage(format!("listen at {address}: {error}"))
        }
        _ => Error::environment(format!("listen at {address}: {error}")),
    })
}

fn parse_uri(text: &str) -> Result<Uri, String> {
    text.parse::<Uri>().map_err(|error| error.to_string())
}
