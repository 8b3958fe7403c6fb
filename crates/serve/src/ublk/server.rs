//! Life cycle of a ublk device: creation or recovery, start, stop and deletion.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use tenmil_base::Error;
use tenmil_base::{BlockDevice, ErrorCategory, IoChannel, Segment, Span};
use tenmil_block::{AdaptationOptions, AdaptedDevice, Bdev, BdevDescriptor, BounceBufferAllocator};
use tenmil_dma::{KernelBufferSource, Region, RegionTable};
use tenmil_linux::Errno;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::ublk::{UblkCharDevice, UblkControl, UblkQueue, UblkQueueRing};
use tenmil_reactor::{PollerBuilder, ReactorId, Registry, ThreadBuilder};
use tenmil_wire::ublk::control::ANY_DEVICE;
use tenmil_wire::ublk::queue::request_data_offset;
use tenmil_wire::ublk::{ControlOp, DeviceInfo, DeviceState, Features, Parameters};

use super::disk::UblkDisk;
use super::error;
use super::poller::{QueueParts, QueuePoller, ZeroCopyBuffers};
use super::tags::{TagTable, UblkStats};
use super::takeover::{self, DesiredDevice, TakeoverAction, decide_takeover};

/// Configuration of a server.
pub struct ServerConfig {
    /// Device number; without one the kernel chooses one.
    pub number: Option<u32>,
    /// Block device to export.
    pub medium: Arc<dyn BlockDevice>,
    /// Whether the disk is read-only.
    pub is_read_only: bool,
    /// Value by which a later process recognizes that it exports the same device; see
    /// [`uri_hash`].
    pub signature: u64,
    /// Queues of a new device.
    pub limits: QueueCountAndDepth,
    /// Whether a device of that number, left behind by a dead server of something else, is deleted.
    pub replaces: bool,
    /// Whether to use zero copy where kernel and device support it.
    pub wants_zero_copy: bool,
    /// Region table for the memory of queues; two regions per queue.
    pub regions: RegionTable,
    /// Reactors that run the queues.
    pub reactors: Arc<Registry>,
}

/// Queue limits of a new device. A recovered device keeps its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCountAndDepth {
    /// Number of queues; the kernel creates at most one per processor.
    pub queues: u16,
    /// Depth of each queue, at most 1024.
    pub depth: u16,
}

/// Running ublk device. Its disk exists until [`stop_disk`](Self::stop_disk). If it is dropped without, the
/// kernel detects that the device has no server.
#[derive(Debug)]
pub struct Server {
    control: UblkControl,
    info: DeviceInfo,
    has_recovered: bool,
    /// Whether zero copy is used, or why not.
    zero_copy: Result<(), Error>,
    is_stopped: bool,
    events: Receiver<UblkEvent>,
    queues_left: u16,
}

/// Event of a ublk device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UblkEvent {
    /// A queue has ended.
    QueueEnded {
        /// Queue number.
        queue: u16,
        /// Requests completed by it.
        done: UblkStats,
    },
    /// An error, as one line of text.
    Error(String),
}

/// Timeout of control commands that do not wait for other processes.
const TIME_LIMIT: Span = Span::from_secs(10);
/// Timeout for starting a disk: the kernel reads its partition table through this server.
const STARTING: Span = Span::from_secs(60);
/// Time after which the kernel has certainly detected that a server died: it checks requests that
/// take longer than 30 seconds.
const TAKEOVER_TIMEOUT: Span = Span::from_secs(40);
const RETRY_INTERVAL: Span = Span::from_ms(50);
/// Mailbox capacity of a queue's light thread; it receives hardly any messages.
const MAILBOX: usize = 16;
/// Largest depth, such that the data of a queue fit into a segment.
const DEPTH_MAX: u16 = 1024;
/// Features that every device needs.
const NEEDED: Features = Features::IOCTL_ENCODE.union(Features::USER_COPY);
/// Features that user recovery needs in addition.
const RECOVERED: Features = Features::RECOVERY.union(Features::RECOVERY_REISSUE);
/// Features that zero copy needs in addition. The device's I/O context may run on another thread
/// than the queue.
const ZERO_COPY_FEATURES: Features = Features::ZERO_COPY.union(Features::BUFFERS_FROM_ANY_THREAD);
/// Size of a bounce buffer, in bytes, and the number of them.
const BUFFER_BYTES: u32 = 64 << 10;
const BUFFERS: u16 = 4;

/// Returns a block device that Linux can use as a disk: the device itself, or an adapter that
/// splits and emulates what it cannot do.
///
/// # Errors
///
/// If memory is exhausted.
pub fn adapt_device(
    device: &Bdev,
    descriptor: BdevDescriptor,
    regions: &RegionTable,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let (limits, descriptor) = (device.current_limits(), Arc::new(descriptor));
    let is_small = limits.request_blocks_max.saturating_mul(limits.block_size) < 4096;
    if limits.optimal_boundary_blocks == 0 && !is_small {
        return Ok(descriptor);
    }
    let memory = BounceBufferAllocator::new(regions, BUFFER_BYTES, BUFFERS)?;
    Ok(Arc::new(AdaptedDevice::new(device, descriptor, memory, AdaptationOptions::default())?))
}

/// Hash by which a device with this URI is recognized (FNV-1a of a prefix and its bytes).
pub fn uri_hash(uri: &str) -> u64 {
    let bytes = b"tenmil\0".iter().chain(uri.as_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Server {
    /// Creates a device, or takes over the one that a dead process left under its number, and
    /// starts its disk.
    ///
    /// # Errors
    ///
    /// Why that failed. No new device is left behind.
    pub fn start(machine: &KernelFiles, config: &ServerConfig) -> Result<Self, Error> {
        if !(1..=DEPTH_MAX).contains(&config.limits.depth) || config.limits.queues == 0 {
            let QueueCountAndDepth { queues, depth } = config.limits;
            return Err(Error::usage(format!(
                "ublk: {queues} queues of {depth} requests, expected some, of 1 to {DEPTH_MAX}"
            )));
        }
        let disk =
            UblkDisk::new(config.medium.limits(), config.is_read_only).map_err(Error::usage)?;
        let mut control = UblkControl::open(machine)?;
        let has = check_features(&mut control)?;
        let zero_copy = required_zero_copy_alignment(config, has);
        let disk = match &zero_copy {
            Ok(alignment) => disk.with_alignment(*alignment),
            Err(_) => disk,
        };
        let desired = DesiredDevice {
            disk: &disk,
            signature: config.signature,
            channels_max: config.medium.channels_max(),
            replaces: config.replaces,
        };
        let number = config
            .number
            .or_else(|| find_abandoned_device(machine, &mut control, config.signature));
        let found = match number {
            Some(number) => find_device_to_take_over(machine, &mut control, number, &desired)?,
            None => None,
        };
        let has_recovered = found.is_some();
        let info = match found {
            Some(info) => info,
            None => create_device(&mut control, config, &disk, zero_copy.is_ok())?,
        };
        let zero_copy = zero_copy.and_then(|_| zero_copy_result(&info, has_recovered));
        let (event_sender, events) = channel();
        let queues_left = info.queues;
        let mut server = Self {
            control,
            info,
            has_recovered,
            zero_copy,
            is_stopped: false,
            events,
            queues_left,
        };
        match server.start_disk(machine, config, &disk, &event_sender) {
            Ok(()) => Ok(server),
            Err(StartError::Device(why)) => Err(why),
            Err(StartError::Disk(why)) => {
                // A device that was taken over stays as it was found: its requests still wait for a
                // server.
                if !has_recovered {
                    let _ = server.delete_device(machine);
                }
                Err(why)
            }
        }
    }

    /// Device number.
    pub fn device_number(&self) -> u32 {
        self.info.device
    }

    /// Path of the disk.
    pub fn disk_path(&self) -> String {
        format!("/dev/ublkb{}", self.info.device)
    }

    /// Queues of the device.
    pub fn limits(&self) -> QueueCountAndDepth {
        QueueCountAndDepth { queues: self.info.queues, depth: self.info.depth }
    }

    /// Whether the device was taken over from a dead process.
    pub fn has_recovered(&self) -> bool {
        self.has_recovered
    }

    /// Whether zero copy is used, or why not, as one line.
    pub fn zero_copy_status(&self) -> Result<(), &str> {
        self.zero_copy.as_ref().copied().map_err(|error| error.text.as_str())
    }

    /// Next event, if any.
    pub fn next_event(&mut self) -> Option<UblkEvent> {
        let new_events = self.events.try_recv().ok();
        if matches!(new_events, Some(UblkEvent::QueueEnded { .. })) {
            self.queues_left = self.queues_left.saturating_sub(1);
        }
        new_events
    }

    /// Whether any queue is still served. If none is, the disk is gone.
    pub fn has_active_queue(&self) -> bool {
        self.queues_left > 0
    }

    /// Stops the disk: outstanding requests complete, which requires running reactors; new ones
    /// fail.
    ///
    /// # Errors
    ///
    /// If that takes longer than `time_limit`.
    pub fn stop_disk(&mut self, time_limit: Span) -> Result<(), Error> {
        if self.is_stopped {
            return Ok(());
        }
        self.is_stopped = true;
        self.control_command(ControlOp::StopDevice, 0, time_limit).map(drop)
    }

    /// Deletes the device, after its reactors have ended. The number becomes free once no process
    /// has the disk open.
    ///
    /// # Errors
    ///
    /// The error of the kernel.
    pub fn delete_device(mut self, machine: &KernelFiles) -> Result<(), Error> {
        let device = self.info.device;
        delete_device(&mut self.control, device).or_else(|_| {
            // The control channel may be blocked by a command that timed out, so a new one is
            // opened.
            delete_device(&mut UblkControl::open(machine)?, device)
        })
    }

    /// Starts the queues and then the disk.
    fn start_disk(
        &mut self,
        machine: &KernelFiles,
        config: &ServerConfig,
        disk: &UblkDisk,
        event_sender: &Sender<UblkEvent>,
    ) -> Result<(), StartError> {
        let name = format!("ublk:{}", self.info.device);
        let refused = |queue: u16, why: String| {
            StartError::Disk(Error::environment(format!("{name}: queue {queue}: {why}")))
        };
        // Everything that can fail on this side comes first, because the kernel starts a recovery
        // only once.
        let mut resources = Vec::new();
        for number in 0..self.info.queues {
            let created = QueueResources::new(config, disk, self.info.depth);
            resources.push(created.map_err(|why| refused(number, why.to_string()))?);
        }
        if self.has_recovered {
            // The kernel may still hold references of the dead process.
            let mut retries_left = TAKEOVER_TIMEOUT.ns / RETRY_INTERVAL.ns;
            while let Err(why) = self.try_control_command(ControlOp::StartRecovery, 0, TIME_LIMIT) {
                if why != Errno::BUSY || retries_left == 0 {
                    let why = error::control_command_error(ControlOp::StartRecovery, &name, why);
                    return Err(StartError::Disk(why));
                }
                retries_left -= 1;
                tenmil_linux::named_thread::sleep(RETRY_INTERVAL);
            }
        }
        let device = UblkCharDevice::open(machine, self.info.device).map_err(|errno| {
            let why = Error::environment(format!("open /dev/ublkc{}: {errno}", self.info.device));
            if errno == Errno::BUSY { StartError::Device(why) } else { StartError::Disk(why) }
        })?;
        let device = Arc::new(device);
        let reactors: Vec<ReactorId> = config.reactors.reactors().collect();
        for (number, resources) in (0..).zip(resources) {
            let reactor = reactors.get(usize::from(number) % reactors.len().max(1)).copied();
            self.start_queue(config, disk, (number, reactor, resources), &device, event_sender)
                .map_err(|why| refused(number, why.to_string()))?;
        }
        let op = match self.has_recovered {
            true => ControlOp::EndRecovery,
            false => ControlOp::StartDevice,
        };
        let started = self.control_command(op, u64::from(std::process::id()), STARTING);
        started.map(drop).map_err(StartError::Disk)
    }

    fn start_queue(
        &self,
        config: &ServerConfig,
        disk: &UblkDisk,
        (number, reactor, resources): (u16, Option<ReactorId>, QueueResources),
        device: &Arc<UblkCharDevice>,
        event_sender: &Sender<UblkEvent>,
    ) -> Result<(), Error> {
        let ServerConfig { regions, reactors, .. } = config;
        let QueueResources { memory, backend, ring } = resources;
        let depth = self.info.depth;
        let zero_copy = match &self.zero_copy {
            Ok(()) => {
                let whole =
                    register_buffers(device, regions, number, (depth, disk.io_bytes_max()))?;
                Some(ZeroCopyBuffers { regions: regions.clone(), whole })
            }
            Err(_) => None,
        };
        let driver = UblkQueue::new(ring, Arc::clone(device), regions, number);
        let serving = QueuePoller::new(QueueParts {
            number,
            driver: driver.map_err(Error::environment)?,
            backend,
            tags: TagTable::new(disk.clone(), depth, memory.segment()),
            memory,
            zero_copy,
            event_sender: event_sender.clone(),
        });
        let serving = serving.map_err(Error::environment)?;
        let poller_wake = serving.poller_wake().map_err(Error::environment)?;
        let has_kernel_io = serving.does_kernel_deliver_completions();
        let registration = PollerBuilder::polled_each_iteration("queue", poller_wake, serving)
            // The thread that fetches first is the only one whose commands the kernel accepts.
            .pinned("the kernel knows its queue by the thread that serves it");
        let registration = if has_kernel_io { registration.no_spin() } else { registration };
        let config = ThreadBuilder::new(&format!("ublk-{number}"))
            .mailbox_size(MAILBOX)
            .add_poller(registration);
        let config = match reactor {
            Some(reactor) => config.on_reactor(reactor),
            None => config,
        };
        reactors.spawn(config).map(drop).map_err(Error::environment)
    }

    fn try_control_command(
        &mut self,
        op: ControlOp,
        data: u64,
        time_limit: Span,
    ) -> Result<i32, Errno> {
        self.control.execute(op, (self.info.device, data), &mut [], time_limit)
    }

    fn control_command(
        &mut self,
        op: ControlOp,
        data: u64,
        time_limit: Span,
    ) -> Result<i32, Error> {
        let name = format!("ublk:{}", self.info.device);
        self.try_control_command(op, data, time_limit)
            .map_err(|errno| error::control_command_error(op, &name, errno))
    }
}

/// Resources of a queue whose allocation may fail.
struct QueueResources {
    memory: Region,
    backend: Box<dyn IoChannel>,
    ring: UblkQueueRing,
}

impl QueueResources {
    fn new(config: &ServerConfig, disk: &UblkDisk, depth: u16) -> Result<Self, Error> {
        let bytes = usize::from(depth) * disk.io_bytes_max() as usize;
        let memory = config.regions.allocate_region(bytes).map_err(Error::environment)?;
        let ring = UblkQueueRing::new(depth).map_err(Error::environment)?;
        Ok(Self { memory, backend: config.medium.channel()?, ring })
    }
}

/// Why a disk was not started.
enum StartError {
    /// Error on this side.
    Disk(Error),
    /// Another process has opened the device.
    Device(Error),
}

/// Number of a device that a dead server of the same URI left behind, if any.
fn find_abandoned_device(
    machine: &KernelFiles,
    control: &mut UblkControl,
    signature: u64,
) -> Option<u32> {
    let names = machine.directory_entries("sys/class/ublk-char");
    let numbers = names.iter().filter_map(|name| name.strip_prefix("ublkc")?.parse().ok());
    numbers.into_iter().find(|number| {
        let mut bytes = [0; DeviceInfo::BYTES];
        let descriptor =
            control.execute(ControlOp::GetDeviceInfo, (*number, 0), &mut bytes, TIME_LIMIT);
        let info = DeviceInfo::from_bytes(&bytes);
        let is_dead = info.state == DeviceState::Quiesced
            || (info.state == DeviceState::Live && !is_process_alive(machine, info.process));
        descriptor.is_ok() && is_dead && info.signature == signature
    })
}

/// Whether zero copy can be used. Returns the required memory alignment, or why it cannot.
fn required_zero_copy_alignment(config: &ServerConfig, has: Features) -> Result<u32, Error> {
    if !config.wants_zero_copy {
        return Err(Error::environment("zero copy was turned off".to_owned()));
    }
    let alignment = config.medium.supports_kernel_buffers()?;
    if has.has(ZERO_COPY_FEATURES) {
        return Ok(alignment);
    }
    let missing: Vec<_> = ZERO_COPY_FEATURES.difference(has).names().collect();
    Err(Error::environment(format!(
        "the kernel has features {:#x}, expected {} as well: Linux 6.17 or newer",
        has.0,
        missing.join(", ")
    )))
}

/// Whether the device uses zero copy, or why data are copied.
pub(super) fn zero_copy_result(info: &DeviceInfo, has_recovered: bool) -> Result<(), Error> {
    if info.features.has(Features::ZERO_COPY) {
        return Ok(());
    }
    let by_whom = if has_recovered { "the process that has died" } else { "the kernel" };
    Err(Error::environment(format!("{by_whom} has made ublk:{} without zero copy", info.device)))
}

/// Registers the request buffers of a queue, indexed by tag, as a region.
fn register_buffers(
    device: &UblkCharDevice,
    regions: &RegionTable,
    queue: u16,
    requests: (u16, u32),
) -> Result<Segment, Error> {
    let descriptor = device.as_fd().try_clone_to_owned().map_err(Error::environment)?;
    let zero_copy_device = KernelBufferSource { descriptor, queue, data_at: request_data_offset };
    regions.register_kernel_buffers(zero_copy_device, requests).map_err(Error::environment)
}

/// Queries the kernel's features. Fails if a required one is missing.
fn check_features(control: &mut UblkControl) -> Result<Features, Error> {
    let mut bytes = [0; 8];
    let needed = NEEDED.union(RECOVERED);
    match control.execute(ControlOp::GetFeatures, (ANY_DEVICE, 0), &mut bytes, TIME_LIMIT) {
        Ok(_) => {
            let has = Features(u64::from_ne_bytes(bytes));
            if has.has(needed) { Ok(has) } else { Err(error::missing_features_error(has, needed)) }
        }
        // Kernels before 6.5 do not know the command.
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => {
            Err(error::missing_features_error(Features::NONE, needed))
        }
        Err(errno) => Err(error::control_command_error(ControlOp::GetFeatures, "ublk", errno)),
    }
}

/// Waits until `number` is free, or returns the device of a dead process that can be taken over.
fn find_device_to_take_over(
    machine: &KernelFiles,
    control: &mut UblkControl,
    number: u32,
    desired: &DesiredDevice<'_>,
) -> Result<Option<DeviceInfo>, Error> {
    let name = format!("ublk:{number}");
    let mut why = "";
    for _ in 0..=TAKEOVER_TIMEOUT.ns / RETRY_INTERVAL.ns {
        let mut bytes = [0; DeviceInfo::BYTES];
        let op = ControlOp::GetDeviceInfo;
        let info = match control.execute(op, (number, 0), &mut bytes, TIME_LIMIT) {
            Ok(_) => DeviceInfo::from_bytes(&bytes),
            Err(Errno::NODEV) => return Ok(None),
            Err(errno) => return Err(error::control_command_error(op, &name, errno)),
        };
        let mut question = Parameters::query_buffer();
        let op = ControlOp::GetParameters;
        let completion = control.execute(op, (number, 0), &mut question, TIME_LIMIT);
        let parameters = completion.ok().and_then(|_| Parameters::from_bytes(&question));
        let server = takeover::ServerProcess {
            is_alive: is_process_alive(machine, info.process),
            has_it_open: info.state == DeviceState::Dead
                && matches!(UblkCharDevice::open(machine, number), Err(Errno::BUSY)),
        };
        match decide_takeover(&info, parameters.as_ref(), server, desired) {
            TakeoverAction::Recover => return Ok(Some(info)),
            TakeoverAction::Leave(why) => return Err(why),
            TakeoverAction::Wait => {
                why = "its server has died, and the kernel has not understood that"
            }
            TakeoverAction::Replace => {
                why = "it was deleted, and a process still has its disk open";
                delete_device(control, number)?;
            }
        }
        tenmil_linux::named_thread::sleep(RETRY_INTERVAL);
    }
    Err(Error::environment(format!("{name}: {why}")))
}

/// Whether a process is alive; a zombie is not.
fn is_process_alive(machine: &KernelFiles, process: i32) -> bool {
    let status = machine.read_trimmed(&format!("proc/{process}/status"));
    let state = |text: &String| {
        let line = text.lines().find_map(|line| line.strip_prefix("State:"))?;
        line.trim().chars().next()
    };
    status.is_some_and(|text| !matches!(state(&text), Some('Z' | 'X')))
}

/// Creates a device, without starting its disk.
fn create_device(
    control: &mut UblkControl,
    config: &ServerConfig,
    disk: &UblkDisk,
    uses_zero_copy: bool,
) -> Result<DeviceInfo, Error> {
    let ServerConfig { number, signature, limits, medium, .. } = config;
    let device = number.unwrap_or(ANY_DEVICE);
    let name = number.map_or_else(|| "ublk:".to_owned(), |number| format!("ublk:{number}"));
    let features =
        if disk.is_persistent_across_processes() { NEEDED.union(RECOVERED) } else { NEEDED };
    let channels = u16::try_from(medium.channels_max()).unwrap_or(u16::MAX);
    let requested = DeviceInfo {
        queues: limits.queues.min(channels),
        depth: limits.depth,
        state: DeviceState::Dead,
        io_bytes_max: disk.io_bytes_max(),
        device,
        process: 0,
        features: if uses_zero_copy { features.union(Features::ZERO_COPY) } else { features },
        signature: *signature,
        owner_uid: 0,
        owner_gid: 0,
    };
    let (mut bytes, op) = (requested.to_bytes(), ControlOp::AddDevice);
    control
        .execute(op, (device, 0), &mut bytes, TIME_LIMIT)
        .map_err(|errno| error::control_command_error(op, &name, errno))?;
    let made = DeviceInfo::from_bytes(&bytes);
    let describe = || {
        if !made.features.has(features) {
            return Err(error::missing_features_error(made.features, features));
        }
        if made.queues == 0
            || (made.depth, made.io_bytes_max) != (requested.depth, requested.io_bytes_max)
        {
            let of = |info: &DeviceInfo| {
                let DeviceInfo { queues, depth, io_bytes_max, .. } = info;
                format!("{queues} queues of {depth} requests of {io_bytes_max} bytes")
            };
            let (made, requested) = (of(&made), of(&requested));
            let text = format!("{name}: the kernel has made {made}, expected {requested} at most");
            return Err(Error::new(ErrorCategory::Remote, text));
        }
        Ok(())
    };
    let op = ControlOp::SetParameters;
    let described = describe().and_then(|()| {
        let descriptor =
            control.execute(op, (made.device, 0), &mut disk.parameters().to_bytes(), TIME_LIMIT);
        descriptor.map(drop).map_err(|errno| error::control_command_error(op, &name, errno))
    });
    if let Err(why) = described {
        // An unusable device is deleted again. The first error is the one to report.
        let _ = delete_device(control, made.device);
        return Err(why);
    }
    Ok(made)
}

/// Deletes a device, asynchronously where the kernel supports it, so as not to wait for processes
/// that have the disk open.
fn delete_device(control: &mut UblkControl, device: u32) -> Result<(), Error> {
    let name = format!("ublk:{device}");
    let op = ControlOp::DeleteDeviceAsync;
    let mut completion = control.execute(op, (device, 0), &mut [], TIME_LIMIT);
    if matches!(completion, Err(Errno::OPNOTSUPP)) {
        completion = control.execute(ControlOp::DeleteDevice, (device, 0), &mut [], TIME_LIMIT);
    }
    match completion {
        // It is already gone.
        Ok(_) | Err(Errno::NODEV) => Ok(()),
        Err(errno) => Err(error::control_command_error(op, &name, errno)),
    }
}

impl std::fmt::Debug for ServerConfig {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, limits, is_read_only, .. } = self;
        out.debug_struct("Plan")
            .field("number", number)
            .field("limits", limits)
            .field("is_read_only", is_read_only)
            .finish_non_exhaustive()
    }
}
