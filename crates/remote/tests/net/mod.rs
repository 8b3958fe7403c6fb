//! Our own host and our own target in one thread, over TCP on loopback.

use std::sync::{Arc, Mutex};

use base::{Broken, Instant, Stream};
use host::socket::{Sockets, loopback};
use target::tcp::{Guest, Service};
use tenmil_remote::{Dial, Dialled};

/// What is shared by both sides: sockets of the host's, and of the target's, which serves here.
pub(crate) struct Net {
    pub(crate) ours: Sockets,
    pub(crate) theirs: Sockets,
    pub(crate) service: Service,
    pub(crate) guests: Arc<Mutex<Vec<Guest>>>,
}

/// A call that is answered at once.
struct Answered(Option<Box<dyn Stream>>);

impl Dialled for Answered {
    fn poll(&mut self, _: Instant) -> Option<Result<Box<dyn Stream>, Broken>> {
        self.0.take().map(Ok)
    }
}

impl Dial for Net {
    fn dial(&mut self, now: Instant, _: Instant) -> Box<dyn Dialled> {
        let [one, other] = loopback().unwrap();
        let stream = self.theirs.stream(other).unwrap();
        self.guests.lock().unwrap().push(self.service.accept(stream, 1, now).unwrap());
        Box::new(Answered(Some(self.ours.stream(one).unwrap())))
    }

    fn peer(&self) -> String {
        "the target".into()
    }
}

/// A turn of everybody who is served.
pub(crate) fn turn_all(guests: &Mutex<Vec<Guest>>, now: Instant) {
    guests.lock().unwrap().iter_mut().for_each(|guest| _ = guest.turn(now));
}
