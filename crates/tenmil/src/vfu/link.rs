//! The connection to the other process, as all threads of this one share it.
//!
//! Whoever waits for an answer carries whatever else comes meanwhile; while nobody waits, the thread
//! that tends the controller does. A doorbell that is a message is sent by whoever rings it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Memory, RegionId, Segment, Span};
use dma::{Adopted, FilePart, Regions};
use host::Clock;
use host::local_socket::{Connection, Received};
use vfu::server::DmaMap;
use vfu::{
    Answer, Area, Capabilities, Client, Errno, IrqAction, IrqData, IrqSet, RegionShape, irq_index,
    region_index,
};

use super::name::VfuName;
use crate::Refused;

/// A handle on the connection. Cheap to clone.
#[derive(Clone)]
pub(super) struct Link {
    shared: Arc<Shared>,
}

struct Shared {
    wire: Mutex<Wire>,
    /// The same socket, to wait for.
    socket: OwnedFd,
    clock: Clock,
    patience: Span,
    name: String,
}

struct Wire {
    connection: Connection,
    client: Client<Arc<OwnedFd>>,
    /// What has come and is awaited.
    answers: Vec<Answer<Arc<OwnedFd>>>,
    /// Why it is over.
    lost: Option<String>,
    regions: Regions,
    /// Memory that the other side may ask for by message, by its address.
    shown: Vec<Shown>,
    buffer: Box<[u8]>,
}

/// A region that the other side knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    iova: u64,
    len_bytes: u64,
    region: RegionId,
}

/// What the other side offers.
pub(super) struct Offer {
    /// The part of it with doorbells, if it can be mapped, and where in BAR 0 it begins.
    pub(super) doorbells: Option<(Arc<Adopted>, Area)>,
    /// How many vectors.
    pub(super) vectors: u32,
    /// Where in BAR 0 their table lies.
    pub(super) table_offset: u32,
}

/// How a question ended.
pub(super) type Replied<T> = Result<T, String>;

const BUFFER_BYTES: usize = 256 << 10;
/// Command register: memory space and bus master.
const COMMAND: (u64, [u8; 2]) = (4, [6, 0]);
/// Class code, from byte 9 on: an NVM Express I/O controller.
const NVM_EXPRESS: [u8; 3] = [0x02, 0x08, 0x01];
const MSIX: u8 = 0x11;
/// Where doorbells begin.
const DOORBELLS: u64 = 0x1000;

impl Link {
    /// Connects, and finds out what the device is like. All of that has a limit.
    pub(super) fn connect(
        name: &VfuName,
        regions: &Regions,
        clock: Clock,
    ) -> Result<(Self, Offer), Refused> {
        let shown = name.shown();
        let connection =
            Connection::connect(&name.path, name.wanted.patience).map_err(|error| {
                let text = format!("attach {shown}: {error}");
                match error.kind() {
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                        let hint = format!(
                            "Start whoever serves it: `tenmil serve URI --listen {shown}`."
                        );
                        Refused { hint: Some(hint), ..Refused::caller(text) }
                    }
                    _ => Refused::machine(text),
                }
            })?;
        let socket = connection.as_fd().try_clone_to_owned();
        let socket =
            socket.map_err(|error| Refused::machine(format!("attach {shown}: {error}")))?;
        let wire = Wire {
            connection,
            client: Client::new(),
            answers: Vec::new(),
            lost: None,
            regions: regions.clone(),
            shown: Vec::new(),
            buffer: vec![0; BUFFER_BYTES].into(),
        };
        let (wire, patience) = (Mutex::new(wire), name.wanted.patience);
        let shared = Shared { wire, socket, clock, patience, name: shown.clone() };
        let link = Self { shared: Arc::new(shared) };
        let offer = link.explore(regions);
        let offer = offer.map_err(|why| Refused::peer(format!("attach {shown}: {why}")))?;
        Ok((link, offer))
    }

    /// What it is called.
    pub(super) fn name(&self) -> &str {
        &self.shared.name
    }

    /// What becomes readable when something has come.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.socket.as_fd()
    }

    /// Why it is over, if it is.
    pub(super) fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// Ends it.
    pub(super) fn lose(&self, why: &str) {
        self.lock().lose(why);
    }

    /// Takes what has come, and sends what is to be sent.
    pub(super) fn carry(&self) {
        let _ = self.lock().carry();
    }

    /// Reads a register.
    pub(super) fn read(&self, region: u32, offset: u64, len_bytes: u32) -> Replied<Vec<u8>> {
        let mut wire = self.lock();
        let id = wire.client.read(region, offset, len_bytes);
        let answer = self.wait(&mut wire, |answer| is_answer_to(answer, id))?;
        match answer {
            Answer::Data { data, .. } => Ok(data),
            other => Err(refused(other)),
        }
    }

    /// Writes a register, some time before what is asked later.
    pub(super) fn post(&self, region: u32, offset: u64, data: &[u8]) {
        let mut wire = self.lock();
        wire.client.post(region, offset, data);
        let _ = wire.send();
    }

    /// Lets the other process reach a region at `iova`: by its descriptor, or by message if it has
    /// none. What was shown there before is taken away first.
    pub(super) fn show(&self, region: RegionId, iova: u64) -> Replied<()> {
        let mut wire = self.lock();
        let len_bytes = wire.regions.len_bytes(region);
        let shown = Shown { iova, len_bytes, region };
        if wire.shown.contains(&shown) {
            return Ok(());
        }
        if let Some(at) = wire.shown.iter().position(|other| other.iova == iova) {
            let before = wire.shown.swap_remove(at);
            self.hide_shown(&mut wire, before)?;
        }
        let file = wire.regions.descriptor(region).map(Arc::new);
        let (is_readable, is_writable) = (true, true);
        let map = DmaMap { iova, len_bytes, file_offset: 0, is_readable, is_writable };
        let id = wire.client.map(map, file);
        self.done(&mut wire, id)?;
        wire.shown.push(shown);
        Ok(())
    }

    /// Takes a region away: once this has returned, the other process does not reach it.
    pub(super) fn hide(&self, region: RegionId) -> Replied<()> {
        let mut wire = self.lock();
        let at = wire.shown.iter().position(|shown| shown.region == region);
        let Some(at) = at else { return Ok(()) };
        let shown = wire.shown.swap_remove(at);
        self.hide_shown(&mut wire, shown)
    }

    fn hide_shown(&self, wire: &mut MutexGuard<'_, Wire>, shown: Shown) -> Replied<()> {
        let id = wire.client.unmap(shown.iova, shown.len_bytes);
        self.done(wire, id)
    }

    /// Has `vector` signalled by `descriptor`.
    pub(super) fn set_vector(&self, vector: u16, descriptor: BorrowedFd<'_>) -> Replied<()> {
        let file = descriptor.try_clone_to_owned().map_err(|error| error.to_string())?;
        let mut wire = self.lock();
        let id = wire.client.set_irqs(IrqSet {
            index: irq_index::MSIX,
            start: vector.into(),
            count: 1,
            action: IrqAction::Trigger,
            data: IrqData::Files(vec![Arc::new(file)]),
        });
        self.done(&mut wire, id)
    }

    fn lock(&self) -> MutexGuard<'_, Wire> {
        self.shared.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn done(&self, wire: &mut Wire, id: u16) -> Replied<()> {
        match self.wait(wire, |answer| is_answer_to(answer, id))? {
            Answer::Done { .. } => Ok(()),
            other => Err(refused(other)),
        }
    }

    /// Waits for an answer.
    fn wait(
        &self,
        wire: &mut Wire,
        is_it: impl Fn(&Answer<Arc<OwnedFd>>) -> bool,
    ) -> Replied<Answer<Arc<OwnedFd>>> {
        let end = self.shared.clock.now().after(self.shared.patience);
        loop {
            wire.carry()?;
            if let Some(at) = wire.answers.iter().position(&is_it) {
                return Ok(wire.answers.swap_remove(at));
            }
            let now = self.shared.clock.now();
            if now >= end {
                let why = format!("no answer within {}", self.shared.patience);
                wire.lose(&why);
                return Err(why);
            }
            let waited = wire.connection.wait_to_receive(end.since(now));
            waited.map_err(|error| error.to_string())?;
        }
    }

    /// Agrees on a version, and asks what the device is like.
    fn explore(&self, regions: &Regions) -> Replied<Offer> {
        let mut wire = self.lock();
        let ends = |answer: &Answer<_>| matches!(answer, Answer::Refused { .. });
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Version(_)) || ends(answer);
        match self.wait(&mut wire, wants)? {
            Answer::Version(_) => {}
            Answer::Refused { error: Errno::BUSY, .. } => {
                return Err("another client has it, expected none".to_owned());
            }
            other => return Err(refused(other)),
        }
        wire.client.device();
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Device { .. }) || ends(answer);
        let Answer::Device { regions: count, irqs, can_reset } = self.wait(&mut wire, wants)?
        else {
            return Err("it does not say what it is".to_owned());
        };
        if count <= region_index::CONFIGURATION || irqs <= irq_index::MSIX {
            return Err(format!("{count} regions and {irqs} interrupts, expected a PCI device"));
        }
        wire.client.region(region_index::BAR0);
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Region { .. }) || ends(answer);
        let Answer::Region { shape: bar, file, .. } = self.wait(&mut wire, wants)? else {
            return Err("it does not say what BAR 0 is like".to_owned());
        };
        wire.client.irqs(irq_index::MSIX);
        let wants = |answer: &Answer<_>| matches!(answer, Answer::Irqs { .. }) || ends(answer);
        let Answer::Irqs { shape: msix, .. } = self.wait(&mut wire, wants)? else {
            return Err("it does not say what its interrupts are like".to_owned());
        };
        if can_reset {
            let id = wire.client.reset();
            self.done(&mut wire, id)?;
        }
        drop(wire);
        let table_offset = self.check_function(&bar)?;
        let doorbells = doorbells_of(regions, &bar, file)?;
        Ok(Offer { doorbells, vectors: msix.count, table_offset })
    }

    /// Looks whether it is an NVMe controller, and lets it reach memory. Where its vector table is.
    fn check_function(&self, bar: &RegionShape) -> Replied<u32> {
        let space = self.read(region_index::CONFIGURATION, 0, 256)?;
        if space[9..12] != NVM_EXPRESS {
            let [interface, subclass, class] = [space[9], space[10], space[11]];
            return Err(format!(
                "class {class:02x}{subclass:02x}{interface:02x}, expected 010802, an NVMe controller"
            ));
        }
        self.post(region_index::CONFIGURATION, COMMAND.0, &COMMAND.1);
        let mut at = usize::from(space[0x34]);
        for _ in 0..48 {
            let Some(capability) = space.get(at..at + 12).filter(|_| at >= 0x40) else { break };
            if capability[0] == MSIX {
                let [a, b, c, d] = [4, 5, 6, 7].map(|byte| capability[byte]);
                let place = u32::from_le_bytes([a, b, c, d]);
                // In another BAR it is of no use here.
                let is_inside = place & 7 == 0 && u64::from(place) < bar.size;
                return Ok(if is_inside { place } else { 0 });
            }
            at = usize::from(capability[1]);
        }
        Ok(0)
    }
}

impl Wire {
    fn lose(&mut self, why: &str) {
        self.lost.get_or_insert_with(|| why.to_owned());
    }

    fn carry(&mut self) -> Replied<()> {
        self.send()?;
        loop {
            if let Some(why) = &self.lost {
                return Err(why.clone());
            }
            let wanted = self.client.wanted().min(self.buffer.len());
            if wanted == 0 {
                return Ok(());
            }
            let (mut files, most) = (Vec::new(), Capabilities::OURS.files_max as usize);
            let received =
                self.connection.receive_files(&mut self.buffer[..wanted], &mut files, most);
            match received {
                Ok(Received::Nothing) => return Ok(()),
                Ok(Received::Bytes(count)) => {
                    let files = files.into_iter().map(Arc::new);
                    match self.client.receive(&self.buffer[..count], files) {
                        Ok(None) => {}
                        Ok(Some(answer)) => self.take(answer)?,
                        Err(violation) => self.lose(&violation.to_string()),
                    }
                }
                Ok(Received::End) => self.lose("the process that served it has gone"),
                Err(error) => self.lose(&error.to_string()),
            }
        }
    }

    fn send(&mut self) -> Replied<()> {
        while let Some(outgoing) = self.client.outgoing() {
            if let Some(why) = &self.lost {
                return Err(why.clone());
            }
            let files: Vec<BorrowedFd<'_>> =
                outgoing.files.iter().map(|file| file.as_fd()).collect();
            match self.connection.send_files(outgoing.bytes, &files) {
                Ok(0) => break,
                Ok(sent) => self.client.sent(sent),
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                    self.lose("the process that served it has gone");
                }
                Err(error) => self.lose(&error.to_string()),
            }
        }
        Ok(())
    }

    /// Keeps an answer for whoever waits for it, and serves what is asked of our memory.
    fn take(&mut self, answer: Answer<Arc<OwnedFd>>) -> Replied<()> {
        match answer {
            Answer::DmaRead { call, iova, len_bytes } => {
                let mut data = vec![0; len_bytes as usize];
                let segment = self.segment(iova, len_bytes);
                match segment.and_then(|segment| self.regions.load(segment, &mut data).ok()) {
                    Some(()) => self.client.data(call, &data),
                    None => self.client.refuse(call, Errno::FAULT),
                }
            }
            Answer::DmaWrite { call, iova, data } => {
                let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
                let segment = self.segment(iova, len_bytes);
                match segment.and_then(|segment| self.regions.store(segment, &data).ok()) {
                    Some(()) => self.client.written(call),
                    None => self.client.refuse(call, Errno::FAULT),
                }
            }
            other => {
                self.answers.push(other);
                return Ok(());
            }
        }
        self.send()
    }

    fn segment(&self, iova: u64, len_bytes: u32) -> Option<Segment> {
        let around = |shown: &&Shown| {
            let skip = iova.wrapping_sub(shown.iova);
            skip < shown.len_bytes && u64::from(len_bytes) <= shown.len_bytes - skip
        };
        let shown = self.shown.iter().find(around)?;
        Some(Segment { region: shown.region, offset: iova - shown.iova, len_bytes })
    }
}

fn is_answer_to<F>(answer: &Answer<F>, wanted: u16) -> bool {
    match answer {
        Answer::Done { id } | Answer::Refused { id, .. } | Answer::Data { id, .. } => *id == wanted,
        _ => false,
    }
}

fn refused<F>(answer: Answer<F>) -> String {
    match answer {
        Answer::Refused { command, error, .. } => format!("{command} was refused: {error}"),
        _ => "an answer to something else".to_owned(),
    }
}

/// Maps the part of BAR 0 with doorbells, if it is offered.
fn doorbells_of(
    regions: &Regions,
    bar: &RegionShape,
    file: Option<Arc<OwnedFd>>,
) -> Replied<Option<(Arc<Adopted>, Area)>> {
    let area = bar.areas.iter().find(|area| area.offset <= DOORBELLS && area.size > 0);
    let Some((area, file)) = area.copied().zip(file) else { return Ok(None) };
    let offset = bar.file_offset.checked_add(area.offset);
    let part = FilePart { offset: offset.unwrap_or(u64::MAX), len_bytes: area.size };
    let adopted = regions.adopt(file.as_fd(), part);
    let adopted = adopted.map_err(|why| format!("doorbells: {why}"))?;
    Ok(Some((Arc::new(adopted), area)))
}
