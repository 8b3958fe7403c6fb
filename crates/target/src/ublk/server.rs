//! A device from its beginning, or its recovery, to its end.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use base::{Backend, Blame, Medium, Segment, Span};
use block::{BounceMemory, Descriptor, Device as BlockDevice, MediumError, ShapeOptions, Shaped};
use dma::{Lender, Region, Regions};
use host::Errno;
use host::machine::Machine;
use host::ublk::{Control, Device, Queue, Ring};
use reactor::{Directory, ReactorId, Registration, ThreadPlan};
use wire::ublk::control::ANY_DEVICE;
use wire::ublk::queue::data_at;
use wire::ublk::{ControlOp, DeviceInfo, DeviceState, Features, Parameters};

use super::claim::{self, Ours, Verdict, judge};
use super::disk::Disk;
use super::poller::{Lending, Parts, Serving};
use super::refused::Refused;
use super::tags::{Done, Tags};

/// What is served, and by whom.
pub struct Plan {
    /// Its number; without one the kernel picks one.
    pub number: Option<u32>,
    /// What it is.
    pub medium: Arc<dyn Medium>,
    /// Whether nobody may write.
    pub is_read_only: bool,
    /// By this a later process knows that it serves the same; see [`signature`].
    pub signature: u64,
    /// Its queues.
    pub limits: Limits,
    /// Whether what a dead server of something else has left at that number is taken away.
    pub replaces: bool,
    /// Whether data are not to be copied where kernel and medium allow that.
    pub wants_zero_copy: bool,
    /// Where the memory of queues lies; two places for each.
    pub regions: Regions,
    /// Who serves.
    pub reactors: Arc<Directory>,
}

/// How much may be asked at once of a new device. One that is taken over has what it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queues; the kernel makes no more than there are processors.
    pub queues: u16,
    /// Requests in each of them, at most 1024.
    pub depth: u16,
}

/// A device that is served. Until [`stop`](Self::stop) its disk is there; dropping it leaves it to
/// the kernel to find out that nobody serves it.
#[derive(Debug)]
pub struct Server {
    control: Control,
    info: DeviceInfo,
    has_recovered: bool,
    /// Or why data are copied.
    zero_copy: Result<(), String>,
    is_stopped: bool,
    told: Receiver<News>,
    queues_left: u16,
}

/// Something that has happened to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// A queue has ended.
    QueueEnded {
        /// Its number.
        queue: u16,
        /// What it has done.
        done: Done,
    },
    /// Something went wrong, in a line.
    Trouble(String),
}

/// How long the kernel may take for a command that waits for nobody.
const PATIENCE: Span = Span::from_secs(10);
/// How long it may take to show a disk, whose partitions it reads from us.
const STARTING: Span = Span::from_secs(60);
/// How long it may take until the kernel has understood that a server has died: it looks after requests
/// that have taken 30 seconds.
const DYING: Span = Span::from_secs(40);
const LOOK_AGAIN: Span = Span::from_ms(50);
/// Messages to a queue's thread: there are hardly any.
const MAILBOX: usize = 16;
/// Requests of a queue whose data fit into a segment.
const DEPTH_MAX: u16 = 1024;
/// What a device is made with.
const NEEDED: Features = Features::IOCTL_ENCODE.and(Features::USER_COPY);
/// The same if it is to outlive us.
const RECOVERED: Features = Features::RECOVERY.and(Features::RECOVERY_REISSUE);
/// What is needed beside it for data that are not copied. The context of a medium may be served by
/// another thread than the queue.
const LENDING: Features = Features::ZERO_COPY.and(Features::LENT_TO_ANY_THREAD);
/// Bytes in a buffer for what a device cannot do by itself, and how many there are.
const BUFFER_BYTES: u32 = 64 << 10;
const BUFFERS: u16 = 4;

/// What Linux can use as a disk: the device itself, or a detour around what it cannot do.
///
/// # Errors
///
/// If there is no memory for it.
pub fn shaped(
    device: &BlockDevice,
    descriptor: Descriptor,
    regions: &Regions,
) -> Result<Arc<dyn Medium>, MediumError> {
    let (limits, descriptor) = (device.limits(), Arc::new(descriptor));
    let is_small = limits.request_blocks_max.saturating_mul(limits.block_size) < 4096;
    if limits.optimal_boundary_blocks == 0 && !is_small {
        return Ok(descriptor);
    }
    let memory = BounceMemory::new(regions, BUFFER_BYTES, BUFFERS)?;
    Ok(Arc::new(Shaped::new(device, descriptor, memory, ShapeOptions::default())?))
}

/// A number by which what is called `uri` is known again (FNV-1a of its bytes, after our name).
pub fn signature(uri: &str) -> u64 {
    let bytes = b"tenmil\0".iter().chain(uri.as_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Server {
    /// Makes a device, or takes over what a dead process has left at its number, and shows its disk.
    ///
    /// # Errors
    ///
    /// Why that cannot be; then there is no device that there was not before.
    pub fn start(machine: &Machine, plan: &Plan) -> Result<Self, Refused> {
        if !(1..=DEPTH_MAX).contains(&plan.limits.depth) || plan.limits.queues == 0 {
            let Limits { queues, depth } = plan.limits;
            return Err(Refused::caller(format!(
                "ublk: {queues} queues of {depth} requests, expected some, of 1 to {DEPTH_MAX}"
            )));
        }
        let disk = Disk::new(plan.medium.limits(), plan.is_read_only).map_err(Refused::caller)?;
        let mut control = Control::open(machine)?;
        let has = check_features(&mut control)?;
        let zero_copy = may_lend(plan, has);
        let disk = match &zero_copy {
            Ok(alignment) => disk.aligned(*alignment),
            Err(_) => disk,
        };
        let ours = Ours {
            disk: &disk,
            signature: plan.signature,
            channels_max: plan.medium.channels_max(),
            replaces: plan.replaces,
        };
        let number = plan.number.or_else(|| left_behind(machine, &mut control, plan.signature));
        let found = match number {
            Some(number) => settle(machine, &mut control, number, &ours)?,
            None => None,
        };
        let has_recovered = found.is_some();
        let info = match found {
            Some(info) => info,
            None => make(&mut control, plan, &disk, zero_copy.is_ok())?,
        };
        let zero_copy = zero_copy.and_then(|_| check_lends(&info, has_recovered));
        let (tell, told) = channel();
        let queues_left = info.queues;
        let mut server =
            Self { control, info, has_recovered, zero_copy, is_stopped: false, told, queues_left };
        match server.show(machine, plan, &disk, &tell) {
            Ok(()) => Ok(server),
            Err(NotShown::Elsewhere(why)) => Err(why),
            Err(NotShown::Here(why)) => {
                // What was taken over stays as it was found: somebody's data wait there.
                if !has_recovered {
                    let _ = server.remove(machine);
                }
                Err(why)
            }
        }
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.info.device
    }

    /// Where its disk is.
    pub fn path(&self) -> String {
        format!("/dev/ublkb{}", self.info.device)
    }

    /// Its queues.
    pub fn limits(&self) -> Limits {
        Limits { queues: self.info.queues, depth: self.info.depth }
    }

    /// Whether it was taken over from a process that had died.
    pub fn has_recovered(&self) -> bool {
        self.has_recovered
    }

    /// Whether data go without a copy in this process, or why they do not, in a line.
    pub fn zero_copy(&self) -> Result<(), &str> {
        self.zero_copy.as_ref().copied().map_err(String::as_str)
    }

    /// The next thing that has happened, if something has.
    pub fn next_news(&mut self) -> Option<News> {
        let news = self.told.try_recv().ok();
        if matches!(news, Some(News::QueueEnded { .. })) {
            self.queues_left = self.queues_left.saturating_sub(1);
        }
        news
    }

    /// Whether some queue is served. When none is, its disk is gone.
    pub fn is_served(&self) -> bool {
        self.queues_left > 0
    }

    /// Takes its disk away: what is under way is answered, for which its reactors must go on; what is
    /// asked from now on fails.
    ///
    /// # Errors
    ///
    /// If that takes longer than `patience`.
    pub fn stop(&mut self, patience: Span) -> Result<(), Refused> {
        if self.is_stopped {
            return Ok(());
        }
        self.is_stopped = true;
        self.ask(ControlOp::StopDevice, 0, patience).map(drop)
    }

    /// Takes the device away, once its reactors have ended. The number is free as soon as nobody has
    /// its disk open.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn remove(mut self, machine: &Machine) -> Result<(), Refused> {
        let device = self.info.device;
        delete(&mut self.control, device).or_else(|_| {
            // The door may wait for ever for an answer that did not come in time.
            delete(&mut Control::open(machine)?, device)
        })
    }

    /// Has its queues served, and its disk shown.
    fn show(
        &mut self,
        machine: &Machine,
        plan: &Plan,
        disk: &Disk,
        tell: &Sender<News>,
    ) -> Result<(), NotShown> {
        let name = format!("ublk:{}", self.info.device);
        let refused = |queue: u16, why: String| {
            NotShown::Here(Refused::machine(format!("{name}: queue {queue}: {why}")))
        };
        // All that can fail by itself comes before the kernel is told: it takes a device over once.
        let mut rooms = Vec::new();
        for number in 0..self.info.queues {
            let room = Room::new(plan, disk, self.info.depth);
            rooms.push(room.map_err(|why| refused(number, why))?);
        }
        if self.has_recovered {
            // The kernel may not have let go of everything that the dead process had.
            let mut left = DYING.ns / LOOK_AGAIN.ns;
            while let Err(why) = self.try_ask(ControlOp::StartRecovery, 0, PATIENCE) {
                if why != Errno::BUSY || left == 0 {
                    let why = Refused::of(ControlOp::StartRecovery, &name, why);
                    return Err(NotShown::Here(why));
                }
                left -= 1;
                host::thread::rest(LOOK_AGAIN);
            }
        }
        let device = Device::open(machine, self.info.device).map_err(|errno| {
            let why = Refused::machine(format!("open /dev/ublkc{}: {errno}", self.info.device));
            if errno == Errno::BUSY { NotShown::Elsewhere(why) } else { NotShown::Here(why) }
        })?;
        let device = Arc::new(device);
        let homes: Vec<ReactorId> = plan.reactors.reactors().collect();
        for (number, room) in (0..).zip(rooms) {
            let home = homes.get(usize::from(number) % homes.len().max(1)).copied();
            self.serve(plan, disk, (number, home, room), &device, tell)
                .map_err(|why| refused(number, why))?;
        }
        let op = match self.has_recovered {
            true => ControlOp::EndRecovery,
            false => ControlOp::StartDevice,
        };
        let started = self.ask(op, u64::from(std::process::id()), STARTING);
        started.map(drop).map_err(NotShown::Here)
    }

    fn serve(
        &self,
        plan: &Plan,
        disk: &Disk,
        (number, home, room): (u16, Option<ReactorId>, Room),
        device: &Arc<Device>,
        tell: &Sender<News>,
    ) -> Result<(), String> {
        let Plan { regions, reactors, .. } = plan;
        let Room { memory, backend, ring } = room;
        let depth = self.info.depth;
        let lending = match &self.zero_copy {
            Ok(()) => {
                let whole = lend(device, regions, number, (depth, disk.io_bytes_max()))?;
                Some(Lending { regions: regions.clone(), whole })
            }
            Err(_) => None,
        };
        let driver = Queue::new(ring, Arc::clone(device), regions, number);
        let serving = Serving::new(Parts {
            number,
            driver: driver.map_err(|errno| errno.to_string())?,
            backend,
            tags: Tags::new(disk.clone(), depth, memory.segment()),
            memory,
            lending,
            tell: tell.clone(),
        });
        let serving = serving.map_err(|error| error.to_string())?;
        let woken_by = serving.woken_by().map_err(|error| error.to_string())?;
        let is_done_by_kernel = serving.is_done_by_kernel();
        let registration = Registration::active("queue", woken_by, serving)
            .tied("the kernel knows its queue by the thread that serves it");
        let registration =
            if is_done_by_kernel { registration.sleeps_at_once() } else { registration };
        let plan = ThreadPlan::new(&format!("ublk-{number}")).mailbox(MAILBOX).poller(registration);
        let plan = match home {
            Some(home) => plan.on(home),
            None => plan,
        };
        reactors.spawn(plan).map(drop).map_err(|refused| refused.to_string())
    }

    fn try_ask(&mut self, op: ControlOp, data: u64, patience: Span) -> Result<i32, Errno> {
        self.control.ask(op, (self.info.device, data), &mut [], patience)
    }

    fn ask(&mut self, op: ControlOp, data: u64, patience: Span) -> Result<i32, Refused> {
        let name = format!("ublk:{}", self.info.device);
        self.try_ask(op, data, patience).map_err(|errno| Refused::of(op, &name, errno))
    }
}

/// What a queue needs that may not be had.
struct Room {
    memory: Region,
    backend: Box<dyn Backend>,
    ring: Ring,
}

impl Room {
    fn new(plan: &Plan, disk: &Disk, depth: u16) -> Result<Self, String> {
        let bytes = usize::from(depth) * disk.io_bytes_max() as usize;
        let memory = plan.regions.allocate(bytes).map_err(|why| why.to_string())?;
        let ring = Ring::new(depth).map_err(|errno| errno.to_string())?;
        Ok(Self { memory, backend: plan.medium.channel()?, ring })
    }
}

/// Why a disk is not shown.
enum NotShown {
    /// For a reason of ours.
    Here(Refused),
    /// Another process has the device, whoever made it.
    Elsewhere(Refused),
}

/// The device that a dead process has left which served the same, if there is one.
fn left_behind(machine: &Machine, control: &mut Control, signature: u64) -> Option<u32> {
    let names = machine.names("sys/class/ublk-char");
    let numbers = names.iter().filter_map(|name| name.strip_prefix("ublkc")?.parse().ok());
    numbers.into_iter().find(|number| {
        let mut bytes = [0; DeviceInfo::BYTES];
        let asked = control.ask(ControlOp::GetDeviceInfo, (*number, 0), &mut bytes, PATIENCE);
        let info = DeviceInfo::from_bytes(&bytes);
        let is_dead = info.state == DeviceState::Quiesced
            || (info.state == DeviceState::Live && !is_alive(machine, info.process));
        asked.is_ok() && is_dead && info.signature == signature
    })
}

/// Whether data need not be copied, and what their memory is to be aligned to then; or why they must.
fn may_lend(plan: &Plan, has: Features) -> Result<u32, String> {
    if !plan.wants_zero_copy {
        return Err("zero copy was turned off".to_owned());
    }
    let alignment = plan.medium.takes_lent()?;
    if has.has(LENDING) {
        return Ok(alignment);
    }
    let missing: Vec<_> = LENDING.without(has).names().collect();
    Err(format!(
        "the kernel has features {:#x}, expected {} as well: Linux 6.17 or newer",
        has.0,
        missing.join(", ")
    ))
}

/// Whether the disk is one whose data are lent, or why they are copied.
pub(super) fn check_lends(info: &DeviceInfo, has_recovered: bool) -> Result<(), String> {
    if info.features.has(Features::ZERO_COPY) {
        return Ok(());
    }
    let by_whom = if has_recovered { "the process that has died" } else { "the kernel" };
    Err(format!("{by_whom} has made ublk:{} without zero copy", info.device))
}

/// Names the data of the requests of a queue, by tag.
fn lend(
    device: &Device,
    regions: &Regions,
    queue: u16,
    requests: (u16, u32),
) -> Result<Segment, String> {
    let descriptor = device.as_fd().try_clone_to_owned().map_err(|why| why.to_string())?;
    let lender = Lender { descriptor, queue, data_at };
    regions.lend(lender, requests).map_err(|why| why.to_string())
}

/// What the kernel can do. Refuses one that lacks what is needed.
fn check_features(control: &mut Control) -> Result<Features, Refused> {
    let mut bytes = [0; 8];
    let needed = NEEDED.and(RECOVERED);
    match control.ask(ControlOp::GetFeatures, (ANY_DEVICE, 0), &mut bytes, PATIENCE) {
        Ok(_) => {
            let has = Features(u64::from_ne_bytes(bytes));
            if has.has(needed) { Ok(has) } else { Err(Refused::too_old(has, needed)) }
        }
        // Before 6.5 the kernel does not even know the question.
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => {
            Err(Refused::too_old(Features::NONE, needed))
        }
        Err(errno) => Err(Refused::of(ControlOp::GetFeatures, "ublk", errno)),
    }
}

/// Looks whether `number` is free; if a dead process has left a device there that we can go on with,
/// that is returned.
fn settle(
    machine: &Machine,
    control: &mut Control,
    number: u32,
    ours: &Ours<'_>,
) -> Result<Option<DeviceInfo>, Refused> {
    let name = format!("ublk:{number}");
    let mut why = "";
    for _ in 0..=DYING.ns / LOOK_AGAIN.ns {
        let mut bytes = [0; DeviceInfo::BYTES];
        let op = ControlOp::GetDeviceInfo;
        let info = match control.ask(op, (number, 0), &mut bytes, PATIENCE) {
            Ok(_) => DeviceInfo::from_bytes(&bytes),
            Err(Errno::NODEV) => return Ok(None),
            Err(errno) => return Err(Refused::of(op, &name, errno)),
        };
        let mut question = Parameters::question();
        let op = ControlOp::GetParameters;
        let answer = control.ask(op, (number, 0), &mut question, PATIENCE);
        let parameters = answer.ok().and_then(|_| Parameters::from_bytes(&question));
        let server = claim::Server {
            is_alive: is_alive(machine, info.process),
            has_it_open: info.state == DeviceState::Dead
                && matches!(Device::open(machine, number), Err(Errno::BUSY)),
        };
        match judge(&info, parameters.as_ref(), server, ours) {
            Verdict::Recover => return Ok(Some(info)),
            Verdict::Leave(why) => return Err(why),
            Verdict::Wait => why = "its server has died, and the kernel has not understood that",
            Verdict::Replace => {
                why = "it was taken away, and somebody still has its disk open";
                delete(control, number)?;
            }
        }
        host::thread::rest(LOOK_AGAIN);
    }
    Err(Refused::machine(format!("{name}: {why}")))
}

/// Whether a process lives: not if only its parent has not asked how it ended.
fn is_alive(machine: &Machine, process: i32) -> bool {
    let status = machine.text(&format!("proc/{process}/status"));
    let state = |text: &String| {
        let line = text.lines().find_map(|line| line.strip_prefix("State:"))?;
        line.trim().chars().next()
    };
    status.is_some_and(|text| !matches!(state(&text), Some('Z' | 'X')))
}

/// Makes a device, with a disk that nobody sees yet.
fn make(
    control: &mut Control,
    plan: &Plan,
    disk: &Disk,
    lends: bool,
) -> Result<DeviceInfo, Refused> {
    let Plan { number, signature, limits, medium, .. } = plan;
    let device = number.unwrap_or(ANY_DEVICE);
    let name = number.map_or_else(|| "ublk:".to_owned(), |number| format!("ublk:{number}"));
    let features = if disk.outlives_process() { NEEDED.and(RECOVERED) } else { NEEDED };
    let channels = u16::try_from(medium.channels_max()).unwrap_or(u16::MAX);
    let wanted = DeviceInfo {
        queues: limits.queues.min(channels),
        depth: limits.depth,
        state: DeviceState::Dead,
        io_bytes_max: disk.io_bytes_max(),
        device,
        process: 0,
        features: if lends { features.and(Features::ZERO_COPY) } else { features },
        signature: *signature,
        owner_uid: 0,
        owner_gid: 0,
    };
    let (mut bytes, op) = (wanted.to_bytes(), ControlOp::AddDevice);
    control
        .ask(op, (device, 0), &mut bytes, PATIENCE)
        .map_err(|errno| Refused::of(op, &name, errno))?;
    let made = DeviceInfo::from_bytes(&bytes);
    let describe = || {
        if !made.features.has(features) {
            return Err(Refused::too_old(made.features, features));
        }
        if made.queues == 0
            || (made.depth, made.io_bytes_max) != (wanted.depth, wanted.io_bytes_max)
        {
            let of = |info: &DeviceInfo| {
                let DeviceInfo { queues, depth, io_bytes_max, .. } = info;
                format!("{queues} queues of {depth} requests of {io_bytes_max} bytes")
            };
            let (made, wanted) = (of(&made), of(&wanted));
            let text = format!("{name}: the kernel has made {made}, expected {wanted} at most");
            return Err(Refused::new(Blame::Peer, text));
        }
        Ok(())
    };
    let op = ControlOp::SetParameters;
    let described = describe().and_then(|()| {
        let asked = control.ask(op, (made.device, 0), &mut disk.parameters().to_bytes(), PATIENCE);
        asked.map(drop).map_err(|errno| Refused::of(op, &name, errno))
    });
    if let Err(why) = described {
        // What cannot be used is not left lying about; that it cannot be used is what is told.
        let _ = delete(control, made.device);
        return Err(why);
    }
    Ok(made)
}

/// Takes a device away, and does not wait for whoever has its disk open, where the kernel knows how.
fn delete(control: &mut Control, device: u32) -> Result<(), Refused> {
    let name = format!("ublk:{device}");
    let op = ControlOp::DeleteDeviceAsync;
    let mut answer = control.ask(op, (device, 0), &mut [], PATIENCE);
    if matches!(answer, Err(Errno::OPNOTSUPP)) {
        answer = control.ask(ControlOp::DeleteDevice, (device, 0), &mut [], PATIENCE);
    }
    match answer {
        // It has gone already.
        Ok(_) | Err(Errno::NODEV) => Ok(()),
        Err(errno) => Err(Refused::of(op, &name, errno)),
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, limits, is_read_only, .. } = self;
        out.debug_struct("Plan")
            .field("number", number)
            .field("limits", limits)
            .field("is_read_only", is_read_only)
            .finish_non_exhaustive()
    }
}
