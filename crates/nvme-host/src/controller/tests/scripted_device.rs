//! Scripted controller: as conformant as the test requires.
//!
//! It is written against the specification's offsets and not against the crate under test, so that an
//! error cannot hide on both sides.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{Doorbell, Instant, Mmio, Span};
use tenmil_wire::{Command, Completion, Status};

use super::shared_memory::SharedMemory;

/// Handle to the device: its registers, its doorbells, and the controls for the test.
#[derive(Clone, Debug)]
pub(super) struct ScriptedDevice(Arc<Mutex<DeviceState>>);

/// Its properties and behavior. Every field may be changed at any time.
#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) now: Instant,
    pub(super) memory: SharedMemory,
    pub(super) cap: u64,
    pub(super) vs: u32,
    pub(super) enable_lag: Span,
    pub(super) disable_lag: Span,
    pub(super) shutdown_lag: Span,
    /// Duration of an admin command.
    pub(super) command_lag: Span,
    /// It is unplugged from this register read on.
    pub(super) unplugged_at_read: u32,
    pub(super) reads: u32,
    /// CSTS.CFS.
    pub(super) fatal: bool,
    /// Admin opcodes that are never completed, until the next reset unless `keeps_muted_after_reset`.
    pub(super) unanswered_opcodes: BTreeSet<u8>,
    pub(super) keeps_muted_after_reset: bool,
    /// Admin opcodes that are rejected.
    pub(super) refuse: BTreeMap<u8, Status>,
    /// Feature identifiers of Set Features that are rejected.
    pub(super) refuse_features: BTreeSet<u8>,
    /// Supported bits of the Asynchronous Event Configuration, and the enabled ones.
    pub(super) events_known: u32,
    pub(super) events_on: u32,
    /// Namespaces for which Identify succeeds without writing data.
    pub(super) identify_without_data: BTreeSet<u32>,
    /// Abort reports that it did not abort.
    pub(super) aborts_fail: bool,
    /// I/O commands are completed.
    pub(super) answers_io: bool,
    /// Queue pairs granted, of each kind.
    pub(super) granted: u16,
    /// Bytes that overwrite parts of Identify Controller.
    pub(super) identity: Vec<(usize, Vec<u8>)>,
    pub(super) namespaces: BTreeMap<u32, ScriptedNamespace>,
    /// Added to every byte of their UUIDs: another disk behind the same controller.
    pub(super) disk: u8,
    /// Contents of the active namespace list, if not the true ones.
    pub(super) active_list: Option<Vec<u32>>,
    pub(super) changed: BTreeSet<u32>,
    pub(super) critical_warning: u8,
    /// Every admin opcode fetched, with CDW10.
    pub(super) fetched: Vec<(u8, u32)>,
    /// Number of resets: CC.EN from 1 to 0.
    pub(super) resets: u32,
    pub(super) subsystem_resets: u32,
    pub(super) event_requests: VecDeque<u16>,
    /// Memory accesses that failed.
    pub(super) faults: Vec<u64>,
    /// Interrupt vectors of its completion queues.
    pub(super) vectors: BTreeMap<u16, Option<u16>>,
    /// Last value of CC.SHN.
    pub(super) notified: Option<u32>,
    /// It supports shadow doorbells.
    pub(super) has_shadows: bool,
    /// Their address, and that of the event indexes.
    pub(super) shadows: Option<(u64, u64)>,
    /// CMBLOC and CMBSZ as enabled, and CMBMSC.
    pub(super) cmb: [u32; 2],
    pub(super) cmbmsc: u64,
    /// The effective address: that in CMBMSC when its low half was written.
    cmb_base: u64,
    /// No address is valid for its buffer.
    pub(super) refuses_address: bool,
    /// Number of reads of the buffer's registers.
    pub(super) cmb_reads: u32,
    /// Number of commands found in its buffer, and the queues located there.
    pub(super) cmb_commands: u64,
    pub(super) cmb_queues: BTreeSet<u16>,

    cc: u32,
    ready: bool,
    shutdown_complete: bool,
    cc_written_at: Instant,
    aqa: u32,
    asq: u64,
    acq: u64,
    submission: BTreeMap<u16, ScriptedSubmissionQueue>,
    completion: BTreeMap<u16, ScriptedCompletionQueue>,
    doorbells: BTreeMap<u32, u32>,
    /// Time, submission queue, and completion.
    completions: Vec<(Instant, u16, Completion)>,
    /// I/O commands that wait for `answers_io`.
    held: Vec<(u16, u16)>,
    events: VecDeque<u32>,
}

/// Namespace of the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptedNamespace {
    pub(super) blocks: u64,
    pub(super) block_shift: u8,
}

#[derive(Debug)]
struct ScriptedSubmissionQueue {
    base: u64,
    depth: u32,
    head: u32,
    completion_queue: u16,
}

#[derive(Debug)]
struct ScriptedCompletionQueue {
    base: u64,
    depth: u32,
    tail: u32,
    phase: bool,
}

/// MQES 255, CQR, TO 1 (half a second), NSSRS, NVM command set.
const CAP: u64 = 255 | 1 << 16 | 1 << 24 | 1 << 36 | 1 << 37;

impl ScriptedDevice {
    pub(super) fn new(memory: &SharedMemory) -> Self {
        let one = ScriptedNamespace { blocks: 1000, block_shift: 12 };
        Self(Arc::new(Mutex::new(DeviceState {
            now: Instant::default(),
            memory: memory.clone(),
            cap: CAP,
            vs: 0x0001_0400,
            enable_lag: Span::from_ms(3),
            disable_lag: Span::from_ms(2),
            shutdown_lag: Span::from_ms(5),
            command_lag: Span::from_us(100),
            unplugged_at_read: u32::MAX,
            reads: 0,
            fatal: false,
            unanswered_opcodes: BTreeSet::new(),
            keeps_muted_after_reset: false,
            refuse: BTreeMap::new(),
            refuse_features: BTreeSet::new(),
            events_known: u32::MAX,
            events_on: 0,
            identify_without_data: BTreeSet::new(),
            aborts_fail: false,
            answers_io: true,
            granted: 8,
            identity: Vec::new(),
            namespaces: BTreeMap::from([(1, one)]),
            disk: 0,
            active_list: None,
            changed: BTreeSet::new(),
            critical_warning: 0,
            fetched: Vec::new(),
            resets: 0,
            subsystem_resets: 0,
            event_requests: VecDeque::new(),
            faults: Vec::new(),
            vectors: BTreeMap::new(),
            notified: None,
            has_shadows: false,
            shadows: None,
            cmb: [0; 2],
            cmbmsc: 0,
            cmb_base: 0,
            refuses_address: false,
            cmb_reads: 0,
            cmb_commands: 0,
            cmb_queues: BTreeSet::new(),
            cc: 0,
            ready: false,
            shutdown_complete: false,
            cc_written_at: Instant::default(),
            aqa: 0,
            asq: 0,
            acq: 0,
            submission: BTreeMap::new(),
            completion: BTreeMap::new(),
            doorbells: BTreeMap::new(),
            completions: Vec::new(),
            held: Vec::new(),
            events: VecDeque::new(),
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, DeviceState> {
        self.0.lock().unwrap()
    }
}

impl Mmio for ScriptedDevice {
    type Doorbell = ScriptedDoorbell;

    fn read32(&mut self, offset: u32) -> u32 {
        let mut state = self.state();
        state.reads += 1;
        state.apply_cc();
        if state.is_unplugged() {
            return u32::MAX;
        }
        match offset {
            0x08 => state.vs,
            0x14 => state.cc,
            0x1c => state.csts(),
            0x38 | 0x3c | 0x58 => state.read_cmb(offset),
            _ => panic!("unexpected read of register {offset:#x}"),
        }
    }

    fn read64(&mut self, offset: u32) -> u64 {
        let mut state = self.state();
        state.reads += 1;
        assert_eq!(offset, 0, "CAP is the only wide register that is read");
        if state.is_unplugged() { u64::MAX } else { state.cap }
    }

    fn write32(&mut self, offset: u32, value: u32) {
        let mut state = self.state();
        state.apply_cc();
        match offset {
            _ if state.is_unplugged() => {}
            0x14 => state.write_cc(value),
            0x20 => {
                assert_eq!(value, 0x4e56_4d65, "NVMe");
                state.subsystem_resets += 1;
                state.fatal = false;
                state.stop_controller();
                (state.cc, state.ready, state.cmbmsc) = (0, false, 0);
            }
            0x50 => state.write_cmbmsc(value),
            0x54 => state.cmbmsc = state.cmbmsc & 0xffff_ffff | u64::from(value) << 32,
            0x24 => state.aqa = value,
            _ => panic!("unexpected write of register {offset:#x}"),
        }
    }

    fn write64(&mut self, offset: u32, value: u64) {
        let mut state = self.state();
        match offset {
            0x28 => state.asq = value,
            0x30 => state.acq = value,
            _ => panic!("unexpected write of register {offset:#x}"),
        }
    }

    fn doorbell(&mut self, offset: u32) -> ScriptedDoorbell {
        ScriptedDoorbell { device: self.clone(), offset }
    }
}

/// Doorbell of the device.
#[derive(Clone, Debug)]
pub(super) struct ScriptedDoorbell {
    device: ScriptedDevice,
    offset: u32,
}

impl Doorbell for ScriptedDoorbell {
    fn ring(&mut self, value: u32) {
        let mut state = self.device.state();
        if state.ready && !state.is_unplugged() {
            state.doorbells.insert(self.offset, value);
        }
    }
}

impl DeviceState {
    fn is_unplugged(&self) -> bool {
        self.reads >= self.unplugged_at_read
    }

    fn csts(&self) -> u32 {
        let shutdown = match (self.cc >> 14 & 3, self.shutdown_complete) {
            (0, _) => 0,
            (_, false) => 1,
            (_, true) => 2,
        };
        u32::from(self.ready) | u32::from(self.fatal) << 1 | shutdown << 2
    }

    /// CAP.CMBS.
    fn has_cmb_control(&self) -> bool {
        self.cap >> 57 & 1 == 1
    }

    fn read_cmb(&mut self, offset: u32) -> u32 {
        self.cmb_reads += 1;
        let is_shown = !self.has_cmb_control() || self.cmbmsc & 1 == 1;
        match offset {
            0x38 if is_shown => self.cmb[0],
            0x3c if is_shown => self.cmb[1],
            0x58 => u32::from(self.refuses_address && self.cmbmsc & 2 != 0),
            _ => 0,
        }
    }

    /// The low half of CMBMSC: makes the address effective.
    fn write_cmbmsc(&mut self, low: u32) {
        assert!(self.has_cmb_control(), "there is no such register");
        self.cmbmsc = self.cmbmsc >> 32 << 32 | u64::from(low);
        self.cmb_base = self.cmbmsc & !0xfff;
    }

    /// Offset in the buffer's BAR, if the address is in the buffer.
    fn cmb_offset(&self, at: u64) -> Option<u64> {
        let [location, size] = self.cmb;
        let is_on = !self.has_cmb_control() || self.cmbmsc & 3 == 3 && !self.refuses_address;
        let unit = 4096 << (4 * (size >> 8 & 0xf));
        let (offset, len) = (u64::from(location >> 12) * unit, u64::from(size >> 12) * unit);
        let base = match self.has_cmb_control() {
            true => self.cmb_base,
            false => super::shared_memory::BAR + offset,
        };
        let skip = at.checked_sub(base)?;
        (is_on && skip < len).then_some(offset + skip)
    }

    fn write_cc(&mut self, cc: u32) {
        if self.cc & 1 != cc & 1 {
            self.cc_written_at = self.now;
            if cc & 1 == 0 {
                self.resets += 1;
            }
        }
        if self.cc & 0xc000 != cc & 0xc000 {
            (self.cc_written_at, self.shutdown_complete) = (self.now, false);
            self.notified = Some(cc >> 14 & 3).filter(|shn| *shn != 0).or(self.notified);
        }
        self.cc = cc;
        self.apply_cc();
    }

    /// Carries out the request in CC once it is due.
    fn apply_cc(&mut self) {
        let enable = self.cc & 1 != 0;
        let waited = self.now.since(self.cc_written_at);
        if enable && !self.ready && waited >= self.enable_lag {
            self.ready = true;
            self.start_controller();
        } else if !enable && self.ready && waited >= self.disable_lag {
            self.ready = false;
            self.fatal = false;
            self.stop_controller();
        }
        if self.cc & 0xc000 != 0 && waited >= self.shutdown_lag {
            self.shutdown_complete = true;
        }
    }

    fn start_controller(&mut self) {
        let (submission_depth, completion_depth) = ((self.aqa & 0xfff) + 1, (self.aqa >> 16) + 1);
        self.add_completion_queue(0, self.acq, completion_depth);
        self.add_submission_queue(0, self.asq, submission_depth, 0);
    }

    fn stop_controller(&mut self) {
        self.submission.clear();
        self.completion.clear();
        self.doorbells.clear();
        self.completions.clear();
        self.held.clear();
        self.events.clear();
        self.event_requests.clear();
        if !self.keeps_muted_after_reset {
            self.unanswered_opcodes.clear();
        }
    }

    fn add_submission_queue(&mut self, id: u16, base: u64, depth: u32, completion_queue: u16) {
        self.doorbells.remove(&(0x1000 + u32::from(id) * 8));
        self.submission
            .insert(id, ScriptedSubmissionQueue { base, depth, head: 0, completion_queue });
    }

    fn add_completion_queue(&mut self, id: u16, base: u64, depth: u32) {
        self.completion.insert(id, ScriptedCompletionQueue { base, depth, tail: 0, phase: true });
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.cc & 1 != 0
    }

    /// The device loses readiness by itself, as after a brownout.
    pub(super) fn lose_readiness(&mut self) {
        self.stop_controller();
        (self.cc, self.ready) = (0, false);
    }

    pub(super) fn has_queue_pair(&self, id: u16) -> bool {
        self.submission.contains_key(&id) && self.completion.contains_key(&id)
    }

    /// Number of queues of each kind in addition to the admin pair.
    pub(super) fn io_queue_pair_count(&self) -> usize {
        self.submission.len() + self.completion.len() - 2
    }

    /// Raises an event: dword 0 of its completion.
    pub(super) fn raise_event(&mut self, kind: u8, what: u8, log_page: u8) {
        let word = u32::from(kind) | u32::from(what) << 8 | u32::from(log_page) << 16;
        self.events.push_back(word);
    }

    /// Changes the namespaces and raises the event for it.
    pub(super) fn change_namespace(&mut self, id: u32, namespace: Option<ScriptedNamespace>) {
        match namespace {
            Some(namespace) => self.namespaces.insert(id, namespace),
            None => self.namespaces.remove(&id),
        };
        if self.changed.insert(id) && self.changed.len() == 1 {
            self.raise_event(2, 0, 4);
        }
    }

    /// Posts a completion without a command.
    pub(super) fn post_invalid_completion(&mut self, queue: u16, cid: u16) {
        let completion = Completion::default().with_cid(cid);
        self.completions.push((self.now, queue, completion));
    }

    /// Time of its next action.
    pub(super) fn wake_at(&self) -> Instant {
        self.completions.iter().map(|(due, ..)| *due).min().unwrap_or(Instant::NEVER)
    }

    /// Fetches the commands that the doorbells announce, and posts the completions that are due.
    pub(super) fn step(&mut self, now: Instant) {
        self.now = now;
        self.apply_cc();
        if !self.ready || self.is_unplugged() {
            return;
        }
        let queues: Vec<u16> = self.submission.keys().copied().collect();
        queues.into_iter().for_each(|queue| self.fetch(queue));
        while !self.events.is_empty() && !self.event_requests.is_empty() {
            let (event, cid) =
                (self.events.pop_front().unwrap(), self.event_requests.pop_front().unwrap());
            self.schedule_completion(0, cid, Status::SUCCESS, event);
        }
        if self.answers_io {
            for (queue, cid) in core::mem::take(&mut self.held) {
                self.schedule_completion(queue, cid, Status::SUCCESS, 0);
            }
        }
        let (due, later) = core::mem::take(&mut self.completions)
            .into_iter()
            .partition(|(due, ..): &(Instant, u16, Completion)| *due <= now);
        self.completions = later;
        for (_, queue, completion) in due {
            self.post_completion(queue, completion);
        }
    }

    fn fetch(&mut self, queue: u16) {
        loop {
            let Some(side) = self.submission.get_mut(&queue) else { return };
            let rung = self.doorbells.get(&(0x1000 + u32::from(queue) * 8)).copied().unwrap_or(0);
            let mut shadow = rung.to_le_bytes();
            if let Some((shadows, _)) = self.shadows.filter(|_| queue > 0) {
                assert!(self.memory.device_load(shadows + u64::from(queue) * 8, &mut shadow));
            }
            if side.head == u32::from_le_bytes(shadow) {
                return;
            }
            let mut bytes = [0; 64];
            let at = side.base + u64::from(side.head) * 64;
            side.head = (side.head + 1) % side.depth;
            let in_cmb = self.cmb_offset(at);
            if in_cmb.is_some() {
                self.cmb_queues.insert(queue);
                self.cmb_commands += 1;
            }
            let is_there = match in_cmb {
                Some(offset) => self.memory.bar_load(offset, &mut bytes),
                None => self.memory.device_load(at, &mut bytes),
            };
            if !is_there {
                self.faults.push(at);
                return;
            }
            let command = Command::from_bytes(&bytes);
            if queue == 0 {
                self.fetched.push((command.opcode(), command.cdw10()));
                self.execute_admin(&command);
            } else {
                self.held.push((queue, command.cid()));
            }
        }
    }

    pub(super) fn schedule_completion(&mut self, queue: u16, cid: u16, status: Status, dw0: u32) {
        let completion = Completion::default().with_cid(cid).with_status(status).with_dw0(dw0);
        self.completions.push((self.now.after(self.command_lag), queue, completion));
    }

    fn post_completion(&mut self, queue: u16, completion: Completion) {
        let Some(submission) = self.submission.get(&queue) else { return };
        let head = u16::try_from(submission.head).unwrap();
        let Some(side) = self.completion.get_mut(&submission.completion_queue) else { return };
        let completion = completion.with_sqhd(head).with_sqid(queue).with_phase(side.phase);
        let at = side.base + u64::from(side.tail) * 16;
        side.tail += 1;
        if side.tail == side.depth {
            (side.tail, side.phase) = (0, !side.phase);
        }
        if !self.memory.device_store(at, &completion.to_bytes()) {
            self.faults.push(at);
        }
    }

    fn execute_admin(&mut self, command: &Command) {
        let (opcode, cid) = (command.opcode(), command.cid());
        if self.unanswered_opcodes.contains(&opcode) {
            return;
        }
        if let Some(status) = self.refuse.get(&opcode) {
            let status = *status;
            return self.schedule_completion(0, cid, status, 0);
        }
        let [low, high] = [command.cdw10() & 0xffff, command.cdw10() >> 16];
        let queue = u16::try_from(low).unwrap();
        let (mut status, mut dw0) = (Status::SUCCESS, 0);
        match opcode {
            0x00 => {
                self.held.retain(|(held, _)| *held != queue);
                self.submission.remove(&queue).unwrap();
            }
            0x01 => {
                let completion_queue = u16::try_from(command.cdw11() >> 16).unwrap();
                assert!(self.completion.contains_key(&completion_queue));
                self.add_submission_queue(queue, command.prp1(), high + 1, completion_queue);
            }
            0x02 => self.execute_get_log_page(command),
            0x04 => drop(self.completion.remove(&queue).unwrap()),
            0x05 => {
                let vector = u16::try_from(command.cdw11() >> 16).unwrap();
                self.vectors.insert(queue, (command.cdw11() & 2 != 0).then_some(vector));
                self.add_completion_queue(queue, command.prp1(), high + 1);
            }
            0x06 => status = self.execute_identify(command),
            0x08 => dw0 = self.execute_abort(queue, u16::try_from(high).unwrap()),
            0x09 if self.refuse_features.contains(&command.cdw10().to_le_bytes()[0]) => {
                status = Status::INVALID_FIELD;
            }
            0x09 if low & 0xff == 0x0b => {
                if command.cdw11() & !self.events_known == 0 {
                    self.events_on = command.cdw11();
                } else {
                    status = Status::INVALID_FIELD;
                }
            }
            0x09 if low & 0xff == 7 => {
                let granted = u32::from(self.granted - 1);
                dw0 = granted << 16 | granted;
            }
            0x09 | 0x0a | 0x0d | 0x10 | 0x11 | 0x14 | 0x15 | 0x18 | 0x80 => {}
            0x7c if self.has_shadows => self.shadows = Some((command.prp1(), command.prp2())),
            0x0c => return self.event_requests.push_back(cid),
            _ => status = Status::INVALID_OPCODE,
        }
        self.schedule_completion(0, cid, status, dw0);
    }

    fn execute_abort(&mut self, queue: u16, cid: u16) -> u32 {
        let held = self.held.len();
        if !self.aborts_fail {
            self.held.retain(|command| *command != (queue, cid));
            if self.held.len() < held {
                self.schedule_completion(queue, cid, Status::ABORT_REQUESTED, 0);
            }
        }
        u32::from(self.held.len() == held)
    }

    fn store_data(&mut self, command: &Command, page: &[u8]) {
        let pointers = [command.prp1(), command.prp2()];
        for (pointer, bytes) in pointers.into_iter().zip(page.chunks(4096)) {
            if !self.memory.device_store(pointer, bytes) {
                self.faults.push(pointer);
            }
        }
    }

    fn execute_get_log_page(&mut self, command: &Command) {
        let len = (command.cdw10() >> 16) as usize * 4 + 4;
        let mut page = vec![0; len.max(4096)];
        match command.cdw10() & 0xff {
            2 => page[0] = self.critical_warning,
            4 => {
                for (id, slot) in core::mem::take(&mut self.changed).iter().zip(page.chunks_mut(4))
                {
                    slot.copy_from_slice(&id.to_le_bytes());
                }
            }
            _ => {}
        }
        page.truncate(len);
        self.store_data(command, &page);
    }

    fn execute_identify(&mut self, command: &Command) -> Status {
        let mut page = vec![0; 4096];
        let id = command.nsid();
        match command.cdw10() & 0xff {
            0x00 => match self.namespaces.get(&id) {
                Some(namespace) => fill_identify_namespace(namespace, &mut page),
                None if self.active_list.is_some() => {}
                None => return Status::INVALID_NAMESPACE_OR_FORMAT,
            },
            0x01 => self.fill_identify_controller(&mut page),
            0x02 => {
                let active: Vec<u32> = match &self.active_list {
                    Some(lie) => lie.clone(),
                    None => self.namespaces.keys().copied().filter(|other| *other > id).collect(),
                };
                for (id, slot) in active.iter().zip(page.chunks_mut(4)) {
                    slot.copy_from_slice(&id.to_le_bytes());
                }
            }
            0x03 => {
                page[..4].copy_from_slice(&[3, 16, 0, 0]);
                page[4..20].fill(id.to_le_bytes()[0].wrapping_add(self.disk));
            }
            _ => return Status::INVALID_FIELD,
        }
        if !self.identify_without_data.contains(&id) {
            self.store_data(command, &page);
        }
        Status::SUCCESS
    }

    fn fill_identify_controller(&self, page: &mut [u8]) {
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[0x86, 0x80, 0x86, 0x80]); // VID, SSVID
        put(4, b"SERIAL-1            ");
        put(24, b"SCRIPTED SSD                            ");
        put(64, b"1.0     ");
        put(77, &[5]); // MDTS: 128 KiB
        put(80, &self.vs.to_le_bytes()); // VER
        put(92, &0x300_u32.to_le_bytes()); // OAES: namespaces, firmware
        put(258, &[3, 7]); // ACL, AERL
        put(512, &[0x66, 0x44]); // SQES, CQES
        put(516, &256_u32.to_le_bytes()); // NN
        for (at, bytes) in &self.identity {
            put(*at, bytes);
        }
    }
}

fn fill_identify_namespace(namespace: &ScriptedNamespace, page: &mut [u8]) {
    let blocks = namespace.blocks.to_le_bytes();
    page[..8].copy_from_slice(&blocks); // NSZE
    page[8..16].copy_from_slice(&blocks); // NCAP
    page[16..24].copy_from_slice(&blocks); // NUSE
    page[130] = namespace.block_shift; // LBAF0: LBADS
}
