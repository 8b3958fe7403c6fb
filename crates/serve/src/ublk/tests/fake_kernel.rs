//! Simulated driver end of a queue.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{Memory, Segment};
use tenmil_dma::RegionTable;
use tenmil_linux::RemoteEventFd;
use tenmil_linux::ublk::FetchedTag;
use tenmil_wire::ublk::IoDescriptor;
use tenmil_wire::ublk::queue::{RES_ABORT, RES_OK};

use super::super::queue_driver::QueueDriver;

/// State of the kernel for one queue. Clones refer to the same queue.
#[derive(Clone)]
pub(super) struct FakeKernel {
    state: Arc<Mutex<FakeKernelState>>,
    line: Arc<RemoteEventFd>,
    waiting: Arc<OwnedFd>,
    regions: RegionTable,
}

#[derive(Default)]
struct FakeKernelState {
    tags: Vec<FakeTag>,
    /// Completed commands that the queue has not received yet.
    fetched: VecDeque<FetchedTag>,
    /// Results of the requests, in the order of completion.
    results: Vec<(u16, i32)>,
    refuses_copies: bool,
    flushes: usize,
}

#[derive(Default)]
struct FakeTag {
    /// The kernel has a command with this tag.
    has_command: bool,
    descriptor: Option<IoDescriptor>,
    /// Data to write, or data that was read.
    data: Vec<u8>,
}

impl FakeKernel {
    pub(super) fn new(depth: u16, regions: &RegionTable) -> Self {
        let (waiting, line) = RemoteEventFd::pair().unwrap();
        let tags = (0..depth).map(|_| FakeTag::default()).collect();
        let state = Arc::new(Mutex::new(FakeKernelState { tags, ..FakeKernelState::default() }));
        let (line, waiting) = (Arc::new(line), Arc::new(waiting));
        Self { state, line, waiting, regions: regions.clone() }
    }

    fn state(&self) -> MutexGuard<'_, FakeKernelState> {
        self.state.lock().unwrap()
    }

    /// Number of commands that the kernel has.
    pub(super) fn pending_command_count(&self) -> usize {
        self.state().tags.iter().filter(|tag| tag.has_command).count()
    }

    /// Issues a request with a free tag; `data` is the data of a write.
    pub(super) fn deliver_request(&self, tag: u16, descriptor: IoDescriptor, data: &[u8]) {
        let mut state = self.state();
        let place = &mut state.tags[usize::from(tag)];
        assert!(place.has_command, "tag {tag} is not waited for");
        place.has_command = false;
        place.descriptor = Some(descriptor);
        place.data = data.to_vec();
        state.fetched.push_back(FetchedTag { tag: u64::from(tag), result: RES_OK });
        drop(state);
        self.line.signal();
    }

    /// Completes a command, whether or not the kernel has it.
    pub(super) fn complete_command(&self, tag: u64, result: i32) {
        self.state().fetched.push_back(FetchedTag { tag, result });
        self.line.signal();
    }

    /// Aborts all commands that the kernel has.
    pub(super) fn abort_all_tags(&self) {
        let mut state = self.state();
        let FakeKernelState { tags, fetched, .. } = &mut *state;
        for (tag, place) in (0..).zip(tags) {
            if std::mem::take(&mut place.has_command) {
                fetched.push_back(FetchedTag { tag, result: RES_ABORT });
            }
        }
        drop(state);
        self.line.signal();
    }

    pub(super) fn set_copies_fail(&self, refuses: bool) {
        self.state().refuses_copies = refuses;
    }

    /// Results of the requests since the last call.
    pub(super) fn take_committed_results(&self) -> Vec<(u16, i32)> {
        std::mem::take(&mut self.state().results)
    }

    /// Data of a completed request.
    pub(super) fn data(&self, tag: u16) -> Vec<u8> {
        self.state().tags[usize::from(tag)].data.clone()
    }

    pub(super) fn flush_count(&self) -> usize {
        self.state().flushes
    }
}

impl QueueDriver for FakeKernel {
    fn fetch(&mut self, tag: u16) {
        let place = &mut self.state().tags[usize::from(tag)];
        assert!(!place.has_command && place.descriptor.is_none(), "tag {tag} is fetched once");
        place.has_command = true;
    }

    fn commit_and_fetch(&mut self, tag: u16, result: i32) {
        let mut state = self.state();
        let place = &mut state.tags[usize::from(tag)];
        assert!(place.descriptor.take().is_some(), "tag {tag} has a request that has not ended");
        place.has_command = true;
        state.results.push((tag, result));
    }

    fn flush(&mut self) {
        self.state().flushes += 1;
    }

    fn poll(&mut self, fetched: &mut Vec<FetchedTag>) {
        fetched.extend(self.state().fetched.drain(..));
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.state().tags[usize::from(tag)].descriptor.unwrap()
    }

    fn copy_from_kernel(&mut self, tag: u16, into: Segment) -> bool {
        let state = self.state();
        let data = &state.tags[usize::from(tag)].data;
        let is_there = !state.refuses_copies && data.len() == into.len_bytes as usize;
        is_there && self.regions.store(into, data).is_ok()
    }

    fn copy_to_kernel(&mut self, tag: u16, from: Segment) -> bool {
        let mut state = self.state();
        let mut data = vec![0; from.len_bytes as usize];
        let is_done = !state.refuses_copies && self.regions.load(from, &mut data).is_ok();
        state.tags[usize::from(tag)].data = data;
        is_done
    }

    fn arm(&mut self) -> bool {
        let mut count = [0; 8];
        // Consumes old signals.
        let _ = take_signals(&self.waiting, &mut count);
        !self.state().fetched.is_empty()
    }

    fn wake_source(&self) -> BorrowedFd<'_> {
        self.waiting.as_fd()
    }
}

fn take_signals(from: &OwnedFd, into: &mut [u8]) -> std::io::Result<usize> {
    use std::io::Read;
    std::fs::File::from(from.try_clone()?).read(into)
}
