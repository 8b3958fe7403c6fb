//! Two hosts at legs that take reservations: what the devices refuse, and what is reserved when.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus,
    Limits, Operation, Request, ReservationControl, ReservationHolder, Segment, Span, WakeSource,
};

use super::ownership::OwnershipFixture;
use crate::mirror::maintenance::ResyncPolicy;
use crate::mirror::{Mirror, MirrorLegDevice, MirrorOptions};

/// The reservation of a namespace: the host that holds it, and its key.
type NamespaceReservation = Arc<Mutex<Option<(u8, u64)>>>;

/// A namespace as one host has it.
#[derive(Clone)]
struct NamespaceOfHost {
    medium: Arc<dyn BlockDevice>,
    held: NamespaceReservation,
    host: u8,
    is_down: Arc<AtomicBool>,
}

struct NamespaceChannel {
    below: Box<dyn IoChannel>,
    namespace: NamespaceOfHost,
    refused: Vec<IoCompletion>,
}

impl NamespaceOfHost {
    fn rejected_status(&self, operation: Operation) -> Option<IoStatus> {
        let other = self.held.lock().unwrap().is_some_and(|(host, _)| host != self.host);
        match self.is_down.load(Ordering::Relaxed) {
            true => Some(IoStatus::PATH_ERROR),
            false if other && operation != Operation::Read => Some(IoStatus::RESERVATION_CONFLICT),
            false => None,
        }
    }
}

impl BlockDevice for NamespaceOfHost {
    fn limits(&self) -> Limits {
        self.medium.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (below, namespace) = (self.medium.channel()?, self.clone());
        Ok(Box::new(NamespaceChannel { below, namespace, refused: Vec::new() }))
    }

    fn reservations(&self) -> Option<&dyn ReservationControl> {
        Some(self)
    }
}

impl ReservationControl for NamespaceOfHost {
    fn holder(&self) -> Result<Option<ReservationHolder>, Error> {
        if self.is_down.load(Ordering::Relaxed) {
            return Err(Error::environment("no path"));
        }
        Ok(self.held.lock().unwrap().map(|(host, key)| ReservationHolder {
            is_this_host: host == self.host,
            is_write_exclusive: true,
            key,
            host: host.to_string(),
        }))
    }

    fn acquire(&self, key: u64, preempted: Option<u64>) -> Result<bool, Error> {
        let mut held = self.held.lock().unwrap();
        let may = held.is_none_or(|(host, old)| host == self.host || preempted == Some(old));
        if may {
            *held = Some((self.host, key));
        }
        Ok(may)
    }

    fn release_and_unregister(&self, key: u64) -> Result<(), Error> {
        self.held.lock().unwrap().take_if(|held| *held == (self.host, key));
        Ok(())
    }
}

impl IoChannel for NamespaceChannel {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        for (index, request) in requests.iter().enumerate() {
            if let Some(status) = self.namespace.rejected_status(request.operation) {
                self.refused.push(IoCompletion { token: request.token, status, result: 0 });
            } else if self.below.submit(now, &[*request], segments) == 0 {
                return index;
            }
        }
        requests.len()
    }

    fn flush_submissions(&mut self) {
        self.below.flush_submissions();
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let refused = self.refused.len();
        self.refused.drain(..).for_each(|completion| completions.push(completion));
        refused + self.below.poll(now, completions)
    }
}

impl ChannelWakeup for NamespaceChannel {
    fn wake_source(&self) -> WakeSource<'_> {
        self.below.wake_source()
    }
}

/// The same legs for two hosts, and their reservations.
fn legs_of_two_hosts(
    bench: &OwnershipFixture,
) -> ([Vec<MirrorLegDevice>; 2], Vec<NamespaceReservation>, Arc<AtomicBool>) {
    let (held, down): (Vec<NamespaceReservation>, _) =
        ([(); 2].map(|()| NamespaceReservation::default()).into(), Arc::default());
    let media = bench.open_legs();
    let legs = [1, 2].map(|host| {
        let leg = |(leg, held): (&MirrorLegDevice, &NamespaceReservation)| {
            let (medium, held) = (leg.medium.clone().unwrap(), Arc::clone(held));
            // The second leg can be cut off.
            let is_second = leg.name.contains("/b");
            let is_down = if is_second { Arc::clone(&down) } else { Arc::default() };
            let medium = NamespaceOfHost { medium, held, host, is_down };
            MirrorLegDevice { name: leg.name.clone(), medium: Ok(Arc::new(medium)) }
        };
        media.iter().zip(&held).map(leg).collect()
    });
    (legs, held, down)
}

fn fast_maintenance_options() -> MirrorOptions {
    let (clear_after, probe_every) = (Span::from_ms(1), Span::from_ms(1));
    MirrorOptions::with_resync_policy(ResyncPolicy { clear_after, probe_every, copy_rate: 4 << 30 })
}

fn open_mirror(
    bench: &OwnershipFixture,
    legs: &[MirrorLegDevice],
    options: &MirrorOptions,
) -> Result<Mirror, Error> {
    bench.open_on_legs(legs, options)
}

#[test]
fn former_owner_is_fenced_and_learns_the_new_owner() {
    let bench = OwnershipFixture::new();
    let ([one, two], held, _) = legs_of_two_hosts(&bench);
    let former = open_mirror(&bench, &one, &fast_maintenance_options()).unwrap();
    let hosts_of = |held: &[NamespaceReservation]| -> Vec<Option<u8>> {
        held.iter().map(|held| held.lock().unwrap().map(|(host, _)| host)).collect()
    };
    assert_eq!(hosts_of(&held), [Some(1), Some(1)]);
    let mut old = former.channel().unwrap();
    assert_eq!(bench.write(&mut *old, 0), IoStatus::SUCCESS);
    let refused = open_mirror(&bench, &two, &fast_maintenance_options()).unwrap_err();
    assert!(refused.text.contains("has it open for writing"), "{refused}");
    let force = MirrorOptions { force: true, ..fast_maintenance_options() };
    let _owner = open_mirror(&bench, &two, &force).unwrap();
    assert_eq!(hosts_of(&held), [Some(2), Some(2)]);
    // In place: no superblock is written before.
    assert!(bench.write(&mut *old, 0).is_conflict());
    let end = bench.clock.now().after(Span::from_secs(60));
    while !former.shared.lock().fence.is_ownership_lost() {
        assert!(bench.clock.now() < end, "it does not look who has the mirror");
        bench.write(&mut *old, 0);
    }
    assert_eq!(
        former.in_sync_mask_and_remaining_regions().0,
        0,
        "no leg is read or written any more"
    );
}

#[test]
fn returning_leg_is_reserved_before_it_rejoins() {
    let bench = OwnershipFixture::new();
    let ([one, _], held, down) = legs_of_two_hosts(&bench);
    let mirror = open_mirror(&bench, &one, &fast_maintenance_options()).unwrap();
    let mut channel = mirror.channel().unwrap();
    assert_eq!(bench.write(&mut *channel, 0), IoStatus::SUCCESS);
    down.store(true, Ordering::Relaxed);
    assert_eq!(bench.write(&mut *channel, 0), IoStatus::SUCCESS, "the other leg has it");
    assert_eq!(mirror.in_sync_mask_and_remaining_regions().0, 0b01);
    // Its target was started anew, and keeps no reservations.
    *held[1].lock().unwrap() = None;
    down.store(false, Ordering::Relaxed);
    let end = bench.clock.now().after(Span::from_secs(60));
    while mirror.in_sync_mask_and_remaining_regions().0 != 0b11 {
        assert!(
            bench.clock.now() < end,
            "the leg does not come back: {:?}",
            mirror.in_sync_mask_and_remaining_regions()
        );
        channel.flush_submissions();
        channel.poll(bench.clock.now(), &mut CompletionBatch::with_capacity(1));
        let is_reserved = held[1].lock().unwrap().is_some_and(|(host, _)| host == 1);
        assert!(
            is_reserved || mirror.in_sync_mask_and_remaining_regions().0 == 0b01,
            "it was joined before"
        );
    }
    assert!(held[1].lock().unwrap().is_some_and(|(host, _)| host == 1));
}

/// Whether a former owner that sends nothing but one flush finds out who has the mirror.
#[test]
fn rejected_flush_makes_a_former_owner_check_ownership() {
    let bench = OwnershipFixture::new();
    let ([one, two], ..) = legs_of_two_hosts(&bench);
    let former = open_mirror(&bench, &one, &MirrorOptions::default()).unwrap();
    let mut old = former.channel().unwrap();
    assert_eq!(bench.write(&mut *old, 0), IoStatus::SUCCESS);
    let force = MirrorOptions { force: true, ..MirrorOptions::default() };
    let _owner = open_mirror(&bench, &two, &force).unwrap();
    // From here on no time passes for the mirror, so that it looks for no other reason.
    let (now, end) = (bench.clock.now(), bench.clock.now().after(Span::from_secs(20)));
    let flush = Request { operation: Operation::Flush, ..Request::PLACEHOLDER };
    assert_eq!(old.submit(now, &[flush], &[]), 1);
    let mut completions = CompletionBatch::with_capacity(1);
    while !former.shared.lock().fence.is_ownership_lost() {
        assert!(bench.clock.now() < end, "it does not look who has the mirror");
        old.flush_submissions();
        old.poll(now, &mut completions);
    }
    assert!(completions.as_slice()[0].status.is_conflict());
}
