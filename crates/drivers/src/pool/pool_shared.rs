//! An open pool and its clients.
//!
//! ```text
//!   channel ─────────┐                            ┌── transfers, responses ──> the client, and its waker
//!   channel ─────────┼─ requests, completions ─> Pool
//!   metadata thread ─┘                            └── pages, flushes ────────> the metadata thread
//! ```
//!
//! The pool is behind a lock under which nothing blocks. The holder submits requests or reports
//! completions to the pool, and dispatches the resulting actions. Data is transferred by the client that
//! requested it, over its own channel to the devices; metadata by the metadata thread, which runs as long
//! as the pool is open.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Error, Interrupts, IoChannel, IoStatus};
use tenmil_linux::{EventFdVectors, Notifier};
use tenmil_volume::{ActionResult, DeviceAction, Pool, PoolError, PoolRequest, PoolResponse};

use super::grow_pool::NewDeviceChannel;
use super::read_epochs;

/// State shared by all clients of an open pool.
pub(super) struct PoolShared {
    state: Mutex<PoolSharedState>,
    /// The current transaction, or an earlier one.
    transaction: AtomicU64,
    /// Number of times that completed but unflushed writes may have been lost.
    loss_count: AtomicU64,
    /// Losses that the device had counted before the durable state was read last. No read is in flight
    /// while this changes.
    device_losses: AtomicU64,
    /// Wakes the metadata thread.
    waker: Notifier,
}

/// State behind the lock.
pub(super) struct PoolSharedState {
    pub(super) store: Pool,
    clients: BTreeMap<u32, ClientEntry>,
    next_client: u32,
    /// Actions for the metadata thread.
    pages: VecDeque<DeviceAction>,
    /// Ids of volumes that are open for writing.
    pub(super) written: Vec<u64>,
    /// Ids of volumes and snapshots that are open for outside users, once per open.
    pub(super) used: Vec<u64>,
    /// Names of snapshots that are being received.
    pub(super) arriving: Vec<String>,
    /// Number of times that an outside user was notified of growth.
    pub(super) reported: u64,
    /// Number of open volumes.
    pub(super) volumes_open: u64,
    /// For each open volume, the count of invalidations of its runs.
    epochs: BTreeMap<u64, Arc<AtomicU64>>,
    /// Whether the takeover by another owner has invalidated all runs.
    is_taken_over: bool,
}

/// A client, as seen by the lock holder.
struct ClientEntry {
    inbox: Arc<ClientInbox>,
    waker: EventFdVectors,
    messages: VecDeque<ClientMessage>,
    /// If it reads by cached runs: its oldest read.
    reads: Option<read_epochs::OldestReadTransaction>,
    /// Whether it has its own channel to the devices.
    has_channel: bool,
}

/// State of a client that it reads without the lock. Its messages are behind the lock of the pool, which
/// sender and receiver hold anyway: a [`Mailbox`](tenmil_base::Mailbox) would lock once more for each I/O.
pub(super) struct ClientInbox {
    pub(super) number: u32,
    has_messages: AtomicBool,
    pub(super) waker: EventFdVectors,
}

/// A message to a client.
#[derive(Debug)]
pub(super) enum ClientMessage {
    /// Perform a data transfer.
    Do(DeviceAction),
    /// The response to the request with this number.
    Ended(u32, Result<PoolResponse, PoolError>),
    /// Add a channel to a new device.
    More(NewDeviceChannel),
}

impl PoolShared {
    /// For a device that has counted `device_losses` before or while the pool was opened.
    pub(super) fn new(store: Pool, device_losses: u64, waker: Notifier) -> Self {
        let state = PoolSharedState {
            store,
            clients: BTreeMap::new(),
            next_client: 0,
            pages: VecDeque::new(),
            written: Vec::new(),
            used: Vec::new(),
            reported: 0,
            arriving: Vec::new(),
            volumes_open: 0,
            epochs: BTreeMap::new(),
            is_taken_over: false,
        };
        let transaction = AtomicU64::new(state.store.open_generation());
        let (loss_count, device_losses) = (AtomicU64::new(0), AtomicU64::new(device_losses));
        Self { state: Mutex::new(state), transaction, loss_count, device_losses, waker }
    }

    /// The current transaction, or an earlier one.
    #[inline]
    pub(super) fn transaction(&self) -> u64 {
        self.transaction.load(Ordering::Acquire)
    }

    /// Number of times that completed but unflushed writes may have been lost. A channel whose last
    /// failed flush was before that fails another one.
    #[inline]
    pub(super) fn write_loss_count(&self) -> u64 {
        // Stored before the responses of the pool are sent, which are read after this.
        self.loss_count.load(Ordering::Acquire)
    }

    /// Whether the device has lost completed writes that the pool has not recovered from, by the count of
    /// a channel: a read that has completed on it may have found older blocks than the map refers to.
    ///
    /// Compared after each poll. A recovery stores the count only when all reads have ended, so a read
    /// that began before the loss is compared with the count of before.
    #[inline]
    pub(super) fn has_unrecovered_loss(&self, channel: &dyn IoChannel) -> bool {
        channel.known_write_loss_count() > self.device_losses.load(Ordering::Acquire)
    }

    /// Stops the pool because of such a loss, and starts its recovery.
    #[cold]
    pub(super) fn handle_loss(&self) {
        let mut state = self.lock_to_submit();
        state.store.handle_lost_writes();
        self.dispatch_actions(&mut state);
    }

    /// If the pool is about to read the durable state again: acknowledges what the device has lost before
    /// that on the channel that flushes.
    ///
    /// # Errors
    ///
    /// Why reads may return what is not on the medium.
    pub(super) fn accept_losses_before_reread(
        &self,
        channel: &mut dyn IoChannel,
    ) -> Result<(), String> {
        let state = self.lock();
        if state.store.is_rereading() && self.has_unrecovered_loss(channel) {
            let count = channel.known_write_loss_count();
            channel.accept_write_losses().map_err(|error| error.to_string())?;
            channel.ack_repaired_write_losses(count);
            self.device_losses.store(count, Ordering::Release);
        }
        Ok(())
    }

    /// Takes the lock to submit to the pool, and updates its oldest read.
    pub(super) fn lock_to_submit(&self) -> MutexGuard<'_, PoolSharedState> {
        let mut state = self.lock();
        // Pairs with the fence in `ReadEpochs::begin_read`: a channel whose read epoch is not seen here has
        // seen all earlier invalidations of runs.
        fence(Ordering::SeqCst);
        let clients = state.clients.values().filter_map(|client| client.reads.as_ref());
        let oldest = clients
            .map(read_epochs::OldestReadTransaction::oldest_read_transaction)
            .min()
            .unwrap_or(u64::MAX);
        state.store.set_oldest_direct_read(oldest);
        state
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PoolSharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the metadata thread.
    pub(super) fn wake_metadata_thread(&self) {
        self.waker.notify();
    }

    /// Registers a client.
    pub(super) fn register_client(
        &self,
        reads: Option<read_epochs::OldestReadTransaction>,
        has_channel: bool,
    ) -> Result<Arc<ClientInbox>, Error> {
        let waker = EventFdVectors::new(1)
            .map_err(|error| format!("a descriptor: {error}"))
            .map_err(Error::environment)?;
        waker.mask(0);
        let mut state = self.lock();
        let number = state.next_client;
        state.next_client += 1;
        let inbox = Arc::new(ClientInbox {
            number,
            has_messages: AtomicBool::new(false),
            waker: waker.clone(),
        });
        let client = ClientEntry {
            inbox: Arc::clone(&inbox),
            waker,
            messages: VecDeque::new(),
            reads,
            has_channel,
        };
        state.clients.insert(number, client);
        Ok(inbox)
    }

    /// Sends a channel to a new device to every client that has its own channel.
    pub(super) fn add_device_channel(
        &self,
        mut make: impl FnMut() -> Result<NewDeviceChannel, Error>,
    ) -> Result<(), Error> {
        let ways = self.lock().clients.iter().filter(|(_, client)| client.has_channel).count();
        let made = (0..ways).map(|_| make()).collect::<Result<Vec<NewDeviceChannel>, Error>>()?;
        let mut state = self.lock();
        let clients = state.clients.iter().filter(|(_, client)| client.has_channel);
        let clients: Vec<u32> = clients.map(|(number, _)| *number).collect();
        for (client, more) in clients.into_iter().zip(made) {
            state.send_to_client(client, ClientMessage::More(more));
        }
        drop(state);
        self.wake_metadata_thread();
        Ok(())
    }

    /// Unregisters a client: its pending actions fail, and so do the given transfers.
    pub(super) fn unregister_client(
        &self,
        inbox: &ClientInbox,
        transfers: impl Iterator<Item = u64>,
    ) {
        let mut state = self.lock_to_submit();
        let client = state.clients.remove(&inbox.number);
        for note in client.map(|client| client.messages).unwrap_or_default() {
            if let ClientMessage::Do(action) = note {
                state.abort_action(&action);
            }
        }
        for io in transfers {
            state.store.handle_action_result(io, ActionResult::Failed(IoStatus::ABORTED));
        }
        self.dispatch_actions(&mut state);
    }

    /// Dispatches the actions and responses of the pool to the clients and the metadata thread.
    pub(super) fn dispatch_actions(&self, state: &mut PoolSharedState) {
        let before = state.pages.len();
        loop {
            while let Some(action) = state.store.next_action() {
                match client_token(&action) {
                    None => state.pages.push_back(action),
                    Some(token) => state.forward_action(token, action),
                }
            }
            if !self.begin_recovery(state) {
                break;
            }
        }
        while let Some(volume) = state.store.next_invalidated_volume() {
            if let Some(epoch) = state.epochs.get(&volume) {
                // Pairs with the loads of channels: a client that receives the response sees this.
                epoch.fetch_add(1, Ordering::Release);
            }
        }
        if state.store.is_taken_over() && !state.is_taken_over {
            // No cached run is valid any more.
            state.is_taken_over = true;
            for epoch in state.epochs.values() {
                epoch.fetch_add(1, Ordering::Release);
            }
        }
        let transaction = state.store.open_generation();
        // Stored only if it has changed, because all readers share the cache line.
        if self.transaction.load(Ordering::Relaxed) != transaction {
            self.transaction.store(transaction, Ordering::Release);
        }
        while let Some((token, completion)) = state.store.next_response() {
            let (client, number) = token_parts(token);
            state.send_to_client(client, ClientMessage::Ended(number, completion));
        }
        if state.pages.len() > before {
            self.wake_metadata_thread();
        }
    }
}

impl PoolShared {
    /// If the pool has stopped because its device failed, starts to re-read the durable state before any
    /// further request. Cached runs are invalidated.
    fn begin_recovery(&self, state: &mut PoolSharedState) -> bool {
        let losses = state.store.device_error_stop_count();
        if losses == self.loss_count.load(Ordering::Relaxed) {
            return false;
        }
        for epoch in state.epochs.values() {
            epoch.fetch_add(1, Ordering::Release);
        }
        self.loss_count.store(losses, Ordering::Release);
        // A recovery that fails again at once is retried later by the metadata thread.
        state.store.may_recover_at_once() && state.store.start_recovery()
    }
}

impl PoolSharedState {
    /// Submits a request to the pool; the response carries `number`.
    #[inline]
    pub(super) fn submit_request(&mut self, inbox: &ClientInbox, number: u32, ask: PoolRequest) {
        self.store.submit(u64::from(inbox.number) << 32 | u64::from(number), ask);
    }

    /// Whether there is foreground I/O: requests of the pool, and cached reads.
    pub(super) fn has_foreground_io(&self) -> bool {
        let reads = self.clients.values().filter_map(|client| client.reads.as_ref());
        self.store.has_tasks()
            || reads
                .map(read_epochs::OldestReadTransaction::oldest_read_transaction)
                .any(|oldest| oldest != u64::MAX)
    }

    /// Registers a receive. Returns false if one of the same name is in progress.
    pub(super) fn register_receive(&mut self, part: &str) -> bool {
        let is_new = !self.arriving.iter().any(|one| one == part);
        if is_new {
            self.arriving.push(part.to_owned());
        }
        is_new
    }

    /// The invalidation count of a volume's runs.
    pub(super) fn run_invalidation_counter(&mut self, volume: u64) -> Arc<AtomicU64> {
        Arc::clone(self.epochs.entry(volume).or_default())
    }

    /// Takes the actions of the metadata thread.
    pub(super) fn take_page_actions(&mut self, into: &mut VecDeque<DeviceAction>) {
        into.append(&mut self.pages);
    }

    /// Takes the messages of a client, in order.
    pub(super) fn take_messages(
        &mut self,
        inbox: &ClientInbox,
        into: &mut VecDeque<ClientMessage>,
    ) {
        if let Some(client) = self.clients.get_mut(&inbox.number) {
            inbox.has_messages.store(false, Ordering::Relaxed);
            into.append(&mut client.messages);
        }
    }

    fn forward_action(&mut self, token: u64, action: DeviceAction) {
        let (client, _) = token_parts(token);
        if let Some(note) = self.send_to_client(client, ClientMessage::Do(action))
            && let ClientMessage::Do(action) = note
        {
            self.abort_action(&action);
        }
    }

    /// Sends a message to a client. Returns it if the client does not exist.
    fn send_to_client(&mut self, client: u32, note: ClientMessage) -> Option<ClientMessage> {
        let Some(client) = self.clients.get_mut(&client) else { return Some(note) };
        client.messages.push_back(note);
        // Release pairs with the acquire in `has_messages`; the reader then takes the lock.
        client.inbox.has_messages.store(true, Ordering::Release);
        client.waker.raise(0);
        None
    }

    fn abort_action(&mut self, action: &DeviceAction) {
        if let Some(io) = transfer_id(action) {
            self.store.handle_action_result(io, ActionResult::Failed(IoStatus::ABORTED));
        }
    }
}

impl ClientInbox {
    /// Whether there are messages.
    #[inline]
    pub(super) fn has_messages(&self) -> bool {
        self.has_messages.load(Ordering::Acquire)
    }
}

/// The client token of a data transfer; `None` for an action of the pool itself.
fn client_token(action: &DeviceAction) -> Option<u64> {
    match action {
        DeviceAction::ReadData { token, .. }
        | DeviceAction::ReadParent { token, .. }
        | DeviceAction::WriteData { token, .. }
        | DeviceAction::Zero { token, .. } => Some(*token),
        DeviceAction::ReadPage { .. }
        | DeviceAction::ReadSlots { .. }
        | DeviceAction::WritePages { .. }
        | DeviceAction::Flush { .. } => None,
    }
}

/// The id to complete a data transfer with.
pub(super) const fn transfer_id(action: &DeviceAction) -> Option<u64> {
    match action {
        DeviceAction::ReadData { io, .. }
        | DeviceAction::ReadParent { io, .. }
        | DeviceAction::WriteData { io, .. } => Some(*io),
        _ => None,
    }
}

/// The client number and the request number in a token.
#[expect(clippy::cast_possible_truncation, reason = "cut as they were put together")]
const fn token_parts(token: u64) -> (u32, u32) {
    ((token >> 32) as u32, token as u32)
}
