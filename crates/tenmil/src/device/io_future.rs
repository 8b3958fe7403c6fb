//! Future of one operation.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::Buffer;
use super::error::{IoError, IoErrorKind};
use super::operation_slots::{SharedDeviceState, SlotRequest, SlotState};
use super::slot_wait_queue::AcquireResult;

/// Submits a request to the poller of a device and waits for the completion.
pub(super) struct IoFuture<'a> {
    shared: &'a SharedDeviceState,
    state: IoState,
}

enum IoState {
    /// Waits for a free slot; the ticket is its position in the wait queue.
    AwaitingSlot(SlotRequest, Option<u64>),
    /// Waits for the completion of the request in this slot.
    AwaitingCompletion(u32),
    /// The result has been returned.
    Done,
}

/// Result of an operation, with its buffer.
type OpResult = Result<Option<Buffer>, IoError>;

impl<'a> IoFuture<'a> {
    pub(super) fn new(shared: &'a SharedDeviceState, order: SlotRequest) -> Self {
        Self { shared, state: IoState::AwaitingSlot(order, None) }
    }

    fn poll_for_slot(
        &mut self,
        order: SlotRequest,
        ticket: Option<u64>,
        context: &mut Context<'_>,
    ) -> Poll<OpResult> {
        let mut old = None;
        let turn = self.shared.lock_wait_queue().request_slot(ticket, context.waker(), &mut old);
        drop(old);
        match turn {
            AcquireResult::Acquired(index) => self.send_request(index, order, context),
            AcquireResult::Waiting(ticket) => {
                self.state = IoState::AwaitingSlot(order, Some(ticket));
                Poll::Pending
            }
            AcquireResult::Closed => self.device_removed_error(order),
        }
    }

    fn send_request(
        &mut self,
        index: u32,
        order: SlotRequest,
        context: &mut Context<'_>,
    ) -> Poll<OpResult> {
        let mut place = self.shared.lock_slot(index);
        // Checked under the lock of the slot: the poller sets the flag before it locks each slot
        // for the last time, so either this check sees the flag or the poller sees the request.
        if self.shared.is_removed() {
            return self.device_removed_error(order);
        }
        place.order = Some(order);
        place.waker = Some(context.waker().clone());
        place.stage = SlotState::Sent;
        drop(place);
        self.state = IoState::AwaitingCompletion(index);
        // The mailbox has space for every slot, so it is never full. If the poller has ended, it has
        // completed all slots already.
        let _ = self.shared.incoming.send(index);
        self.shared.thread.notify_reactor();
        Poll::Pending
    }

    fn poll_completion(&mut self, index: u32, context: &mut Context<'_>) -> Poll<OpResult> {
        let mut place = self.shared.lock_slot(index);
        let SlotState::Completed(completion) = place.stage else {
            let old = place.waker.replace(context.waker().clone());
            // The drop of a foreign waker may run any code, so it does not run under the lock.
            drop(place);
            drop(old);
            return Poll::Pending;
        };
        let order = std::mem::take(&mut *place).order;
        drop(place);
        release_slot(self.shared, index);
        let order = order.unwrap_or_else(|| unreachable!("a place in use has an order"));
        Poll::Ready(match completion {
            Ok(()) => Ok(order.buffer),
            Err(why) => Err(IoError::new(&self.shared.name, order, why)),
        })
    }

    fn device_removed_error(&self, order: SlotRequest) -> Poll<OpResult> {
        Poll::Ready(Err(IoError::new(&self.shared.name, order, IoErrorKind::DeviceRemoved)))
    }
}

fn release_slot(shared: &SharedDeviceState, index: u32) {
    let next = shared.lock_wait_queue().release_slot(index);
    if let Some(next) = next {
        next.wake();
    }
}

impl Future for IoFuture<'_> {
    type Output = OpResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<OpResult> {
        match std::mem::replace(&mut self.state, IoState::Done) {
            IoState::AwaitingSlot(order, ticket) => self.poll_for_slot(order, ticket, context),
            IoState::AwaitingCompletion(index) => {
                let polled = self.poll_completion(index, context);
                if polled.is_pending() {
                    self.state = IoState::AwaitingCompletion(index);
                }
                polled
            }
            IoState::Done => panic!("polled after its end"),
        }
    }
}

impl Drop for IoFuture<'_> {
    /// A buffer that the device may access stays in its slot until the device has completed the
    /// request.
    fn drop(&mut self) {
        match std::mem::replace(&mut self.state, IoState::Done) {
            IoState::AwaitingSlot(_, Some(ticket)) => {
                let [next, old] = self.shared.lock_wait_queue().remove_waiter(ticket);
                drop(old);
                if let Some(next) = next {
                    next.wake();
                }
            }
            IoState::AwaitingCompletion(index) => {
                let mut place = self.shared.lock_slot(index);
                if let SlotState::Completed(_) = place.stage {
                    let emptied = std::mem::take(&mut *place);
                    drop(place);
                    drop(emptied);
                    release_slot(self.shared, index);
                } else {
                    place.is_unwanted = true;
                    let waker = place.waker.take();
                    drop(place);
                    drop(waker);
                }
            }
            IoState::AwaitingSlot(..) | IoState::Done => {}
        }
    }
}
