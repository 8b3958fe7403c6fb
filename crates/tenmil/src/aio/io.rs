//! One operation, as a future.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::line::Turn;
use super::place::{Order, Shared, Stage};
use super::refused::{NotDone, Why};
use crate::aio::Buffer;

/// Gives the order to the device's poller and waits for the answer.
pub(super) struct Io<'a> {
    shared: &'a Shared,
    state: State,
}

enum State {
    /// For a free place, perhaps with a number in the line.
    AwaitsPlace(Order, Option<u64>),
    /// For the device.
    AwaitsAnswer(u32),
    /// For nothing.
    Over,
}

/// What an operation comes to.
type Ended = Result<Option<Buffer>, NotDone>;

impl<'a> Io<'a> {
    pub(super) fn new(shared: &'a Shared, order: Order) -> Self {
        Self { shared, state: State::AwaitsPlace(order, None) }
    }

    fn ask_for_place(
        &mut self,
        order: Order,
        ticket: Option<u64>,
        context: &mut Context<'_>,
    ) -> Poll<Ended> {
        let mut old = None;
        let turn = self.shared.line().ask(ticket, context.waker(), &mut old);
        drop(old);
        match turn {
            Turn::Takes(index) => self.send(index, order, context),
            Turn::Waits(ticket) => {
                self.state = State::AwaitsPlace(order, Some(ticket));
                Poll::Pending
            }
            Turn::Closed => self.gone(order),
        }
    }

    fn send(&mut self, index: u32, order: Order, context: &mut Context<'_>) -> Poll<Ended> {
        let mut place = self.shared.place(index);
        // Behind the lock: the poller says that it is gone before it locks each place for the last
        // time, and finds what was put there before.
        if self.shared.is_gone() {
            return self.gone(order);
        }
        place.order = Some(order);
        place.waker = Some(context.waker().clone());
        place.stage = Stage::Sent;
        drop(place);
        self.state = State::AwaitsAnswer(index);
        // There is a slot for each place. Should the poller be gone, it has answered all of them.
        let _ = self.shared.incoming.send(index);
        self.shared.thread.ring();
        Poll::Pending
    }

    fn look(&mut self, index: u32, context: &mut Context<'_>) -> Poll<Ended> {
        let mut place = self.shared.place(index);
        let Stage::Answered(answer) = place.stage else {
            let old = place.waker.replace(context.waker().clone());
            // What a waker does when it goes is not known: not under the lock.
            drop(place);
            drop(old);
            return Poll::Pending;
        };
        let order = std::mem::take(&mut *place).order;
        drop(place);
        give_back(self.shared, index);
        let order = order.unwrap_or_else(|| unreachable!("a place in use has an order"));
        Poll::Ready(match answer {
            Ok(()) => Ok(order.buffer),
            Err(why) => Err(NotDone::new(&self.shared.name, order, why)),
        })
    }

    fn gone(&self, order: Order) -> Poll<Ended> {
        Poll::Ready(Err(NotDone::new(&self.shared.name, order, Why::Gone)))
    }
}

fn give_back(shared: &Shared, index: u32) {
    let next = shared.line().give_back(index);
    if let Some(next) = next {
        next.wake();
    }
}

impl Future for Io<'_> {
    type Output = Ended;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Ended> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::AwaitsPlace(order, ticket) => self.ask_for_place(order, ticket, context),
            State::AwaitsAnswer(index) => {
                let polled = self.look(index, context);
                if polled.is_pending() {
                    self.state = State::AwaitsAnswer(index);
                }
                polled
            }
            State::Over => panic!("polled after its end"),
        }
    }
}

impl Drop for Io<'_> {
    /// What the device may touch stays where it is until the device has answered.
    fn drop(&mut self) {
        match std::mem::replace(&mut self.state, State::Over) {
            State::AwaitsPlace(_, Some(ticket)) => {
                let [next, old] = self.shared.line().leave(ticket);
                drop(old);
                if let Some(next) = next {
                    next.wake();
                }
            }
            State::AwaitsAnswer(index) => {
                let mut place = self.shared.place(index);
                if let Stage::Answered(_) = place.stage {
                    let emptied = std::mem::take(&mut *place);
                    drop(place);
                    drop(emptied);
                    give_back(self.shared, index);
                } else {
                    place.is_unwanted = true;
                    let waker = place.waker.take();
                    drop(place);
                    drop(waker);
                }
            }
            State::AwaitsPlace(..) | State::Over => {}
        }
    }
}
