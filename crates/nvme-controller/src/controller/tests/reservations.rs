//! Reservation commands of several hosts, submitted as by their queues.

use tenmil_base::Span;
use tenmil_wire::admin::{
    AsynchronousEventRequest, FormatNvm, GetFeatures, GetLogPage, Identify, SetFeatures,
};
use tenmil_wire::feature::Feature;
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys, ReleaseAction,
    ReleaseKey, ReservationAcquire, ReservationRegister, ReservationRelease, ReservationReport,
    ReservationStatus, ReservationStatusExtended, ReservationType, report_registrants,
    report_registrants_extended,
};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::event::{ReservationEvent, ReservationNotification};
use tenmil_wire::{Command, Layout, Status, TypedCommand};

use super::fixture::{ControllerFixture, FakeBlockDevice, submit_to_controller};
use crate::controller::transport_interface::{
    AdminDataTransfer, AdminResult, QueueCommandId, ReservationCompletion, TransportAction,
};
use crate::controller::{Controller, ControllerConfig, HostIdentity, TransportModel};
use crate::namespace::{Reservation, ReservationKind};

const ORIGIN: QueueCommandId = QueueCommandId { queue: 1, ticket: 0 };
const REGISTER: ReservationRegister = ReservationRegister {
    nsid: 1,
    rrega: RegisterAction::Register,
    iekey: false,
    disnsrs: false,
    cptpl: ChangePersistence::None,
};
const ACQUIRE: ReservationAcquire = ReservationAcquire {
    nsid: 1,
    racqa: AcquireAction::Acquire,
    iekey: false,
    disnsrs: false,
    rtype: ReservationType::WriteExclusive,
};
const RELEASE: ReservationRelease = ReservationRelease {
    nsid: 1,
    rrela: ReleaseAction::Release,
    iekey: false,
    disnsrs: false,
    rtype: ReservationType::WriteExclusive,
};

/// A subsystem with three hosts, each with a controller and its own number as key.
struct ThreeHostsFixture {
    bench: ControllerFixture,
    others: [Controller; 2],
}

impl ThreeHostsFixture {
    fn new() -> Self {
        Self::with_identities(|host| HostIdentity::Extended(host.into()))
    }

    fn with_identities(identity: impl Fn(u16) -> HostIdentity) -> Self {
        let mut bench = ControllerFixture::new();
        let mut others = [bench.open_second_controller(2), bench.open_second_controller(3)];
        bench.controller.set_host(identity(1));
        for (other, host) in others.iter_mut().zip([2, 3]) {
            other.set_host(identity(host));
        }
        Self { bench, others }
    }

    fn controller(&mut self, host: usize) -> &mut Controller {
        if host == 1 { &mut self.bench.controller } else { &mut self.others[host - 2] }
    }

    fn run_command(
        &mut self,
        host: usize,
        command: &Command,
        sent: &[u8],
    ) -> Result<Vec<u8>, Status> {
        let now = self.bench.now;
        let controller = self.controller(host);
        let mut data = match controller
            .reservation_data_length(command)
            .map_err(Status::without_crd_more_dnr)?
        {
            AdminDataTransfer::FromHost(len_bytes) => {
                assert_eq!(len_bytes as usize, sent.len());
                sent.to_vec()
            }
            _ => Vec::new(),
        };
        let end = controller.execute_reservation_command(now, ORIGIN, command, &mut data);
        match end.expect("nothing has to be written down").status {
            Status::SUCCESS => Ok(data),
            status => Err(status.without_crd_more_dnr()),
        }
    }

    fn register(&mut self, host: usize) -> Result<Vec<u8>, Status> {
        let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(host as u64));
        self.run_command(host, &REGISTER.to_command(), keys.as_bytes())
    }

    fn acquire(&mut self, host: usize, rtype: ReservationType) -> Result<Vec<u8>, Status> {
        self.acquire_as(host, ReservationAcquire { rtype, ..ACQUIRE }, 0)
    }

    fn acquire_as(
        &mut self,
        host: usize,
        acquire: ReservationAcquire,
        prkey: u64,
    ) -> Result<Vec<u8>, Status> {
        let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(host as u64).prkey(prkey));
        self.run_command(host, &acquire.to_command(), keys.as_bytes())
    }

    fn release(&mut self, host: usize, release: ReservationRelease) -> Result<Vec<u8>, Status> {
        let key = ReleaseKey::zeroed().with(|key| key.crkey(host as u64));
        self.run_command(host, &release.to_command(), key.as_bytes())
    }

    /// The reservation as seen by a host's queues.
    fn visible_reservation(&mut self, host: usize) -> Option<Reservation> {
        self.controller(host).namespaces().reader().get().get(1).unwrap().reservation
    }

    fn poll(&mut self) {
        self.bench.poll_times(1);
        let now = self.bench.now;
        for other in &mut self.others {
            other.poll(now);
        }
    }
}

#[test]
fn reservation_is_visible_to_all_queues_immediately() {
    for kind in ReservationKind::ALL {
        let mut hosts = ThreeHostsFixture::new();
        assert_eq!(hosts.visible_reservation(1), None);
        hosts.register(1).unwrap();
        hosts.register(2).unwrap();
        hosts.acquire(1, ReservationType::from_code(kind as u8)).unwrap();
        let shared = kind as u8 >= 5;
        let of = |is_holder, is_registrant| Some(Reservation { kind, is_holder, is_registrant });
        assert_eq!(hosts.visible_reservation(1), of(true, true));
        assert_eq!(hosts.visible_reservation(2), of(shared, true));
        assert_eq!(hosts.visible_reservation(3), of(false, false));
        let rtype = ReservationType::from_code(kind as u8);
        hosts.release(1, ReservationRelease { rtype, ..RELEASE }).unwrap();
        assert_eq!([1, 2, 3].map(|host| hosts.visible_reservation(host)), [None; 3]);
    }
}

#[test]
fn invalid_reservation_command_fields_are_rejected() {
    const INVALID: Status = Status::INVALID_FIELD;
    let mut hosts = ThreeHostsFixture::new();
    let keys = [0; 16];
    let beyond = 1025;
    let registers = [
        (ReservationRegister { rrega: RegisterAction::Reserved(3), ..REGISTER }, INVALID),
        (ReservationRegister { cptpl: ChangePersistence::Reserved(1), ..REGISTER }, INVALID),
        (REGISTER, INVALID),
        (ReservationRegister { rrega: RegisterAction::Replace, ..REGISTER }, INVALID),
        (ReservationRegister { nsid: 0, ..REGISTER }, Status::INVALID_NAMESPACE_OR_FORMAT),
        (ReservationRegister { nsid: beyond, ..REGISTER }, Status::INVALID_NAMESPACE_OR_FORMAT),
        (ReservationRegister { nsid: 2, ..REGISTER }, INVALID),
        (
            ReservationRegister { rrega: RegisterAction::Unregister, ..REGISTER },
            Status::RESERVATION_CONFLICT,
        ),
    ];
    for (register, status) in registers {
        assert_eq!(
            hosts.run_command(1, &register.to_command(), &keys),
            Err(status),
            "{register:?}"
        );
    }
    hosts.register(1).unwrap();
    let acquires = [
        ReservationAcquire { racqa: AcquireAction::Reserved(3), ..ACQUIRE },
        ReservationAcquire { rtype: ReservationType::None, ..ACQUIRE },
        ReservationAcquire { rtype: ReservationType::Reserved(7), ..ACQUIRE },
        ReservationAcquire { iekey: true, ..ACQUIRE },
    ];
    for acquire in acquires {
        assert_eq!(hosts.acquire_as(1, acquire, 0), Err(INVALID), "{acquire:?}");
    }
    hosts.acquire(1, ReservationType::WriteExclusive).unwrap();
    let releases = [
        ReservationRelease { rrela: ReleaseAction::Reserved(2), ..RELEASE },
        ReservationRelease { rtype: ReservationType::None, ..RELEASE },
        ReservationRelease { rtype: ReservationType::ExclusiveAccess, ..RELEASE },
        ReservationRelease { iekey: true, ..RELEASE },
    ];
    for release in releases {
        assert_eq!(hosts.release(1, release), Err(INVALID), "{release:?}");
    }
    assert!(hosts.visible_reservation(1).is_some_and(|seen| seen.is_holder));
    let read = Command::new(0x02).with_nsid(1);
    assert_eq!(hosts.run_command(1, &read, &[]), Err(Status::INVALID_OPCODE));
}

#[test]
fn register_may_ignore_the_existing_key() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(1).unwrap();
    let replace = ReservationRegister { rrega: RegisterAction::Replace, ..REGISTER };
    let keys =
        |crkey, nrkey| *RegisterKeys::zeroed().with(|it| it.crkey(crkey).nrkey(nrkey)).as_bytes();
    let conflict = Err(Status::RESERVATION_CONFLICT);
    assert_eq!(hosts.run_command(1, &replace.to_command(), &keys(9, 5)), conflict);
    hosts.run_command(1, &replace.to_command(), &keys(1, 5)).unwrap();
    assert_eq!(hosts.acquire(1, ReservationType::WriteExclusive), conflict, "the key is 5 now");
    let ignoring = ReservationRegister { iekey: true, ..replace };
    hosts.run_command(1, &ignoring.to_command(), &keys(9, 1)).unwrap();
    hosts.acquire(1, ReservationType::WriteExclusive).unwrap();
}

#[test]
fn reservation_report_lists_registrants_and_controllers() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(3).unwrap();
    hosts.register(1).unwrap();
    hosts.acquire(3, ReservationType::ExclusiveAccess).unwrap();
    let report = ReservationReport { nsid: 1, numd: 63, eds: true, disnsrs: false };
    let bytes = hosts.run_command(2, &report.to_command(), &[]).unwrap();
    assert_eq!(bytes.len(), 256);
    let header = ReservationStatusExtended::parse(&bytes).unwrap();
    assert_eq!((header.generation(), header.regstrnt(), header.ptpls()), (2, 2, 0));
    assert_eq!(header.rtype(), ReservationType::ExclusiveAccess);
    let rows: Vec<_> = report_registrants_extended(&bytes)
        .map(|row| (row.cntlid(), row.holds(), row.rkey(), row.hostid()[0]))
        .collect();
    assert_eq!(rows, [(1, false, 1, 1), (3, true, 3, 3)]);

    let header_only = ReservationReport { numd: 1, ..report };
    assert_eq!(hosts.run_command(2, &header_only.to_command(), &[]).unwrap(), bytes[..8]);
    let short = ReservationReport { eds: false, ..report };
    let inconsistent = Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
    assert_eq!(hosts.run_command(2, &short.to_command(), &[]), inconsistent);
    let huge = ReservationReport { numd: u32::MAX, ..report };
    assert_eq!(hosts.run_command(2, &huge.to_command(), &[]), Err(Status::INVALID_FIELD));
}

/// Linux up to 6.10 compares the whole status field with these codes, and would otherwise take a host
/// without access for a broken disk.
#[test]
fn reservation_conflict_status_has_no_dnr() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(1).unwrap();
    let now = hosts.bench.now;
    let mut status = |command: Command, sent: &[u8]| {
        let end = hosts.controller(2).execute_reservation_command(
            now,
            ORIGIN,
            &command,
            &mut sent.to_vec(),
        );
        end.unwrap().status
    };
    let acquire = status(ACQUIRE.to_command(), AcquireKeys::zeroed().as_bytes());
    let release = status(RELEASE.to_command(), ReleaseKey::zeroed().as_bytes());
    assert_eq!([acquire, release], [Status::RESERVATION_CONFLICT; 2]);
    let short = ReservationReport { nsid: 1, numd: 63, eds: false, disnsrs: false };
    let report = status(short.to_command(), &[]);
    assert_eq!(report, Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
    let never = ReservationAcquire { iekey: true, ..ACQUIRE };
    let never = status(never.to_command(), AcquireKeys::zeroed().as_bytes());
    assert_eq!(never, Status::INVALID_FIELD.with_dnr());
}

/// Connect carries an identifier, and zero means none: hosts with zero are distinct.
#[test]
fn anonymous_host_cannot_reserve_over_fabrics() {
    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 64,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![FakeBlockDevice::new()], |_| {}, config);
    let page = bench.run_for_data(Identify { cns: 1, ..Identify::default() }).unwrap();
    let rhii = |page: &[u8]| IdentifyController::from_bytes(page.first_chunk().unwrap()).rhii();
    assert!(rhii(&page));
    assert!(!rhii(
        &ControllerFixture::new().run_for_data(Identify { cns: 1, ..Identify::default() }).unwrap()
    ));
    let report = ReservationReport { nsid: 1, numd: 63, eds: true, disnsrs: false };
    let now = bench.now;
    let mut status = |host: Option<HostIdentity>| {
        if let Some(host) = host {
            bench.controller.set_host(host);
        }
        let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(1));
        let mut data = keys.as_bytes().to_vec();
        [REGISTER.to_command(), report.to_command()].map(|command| {
            bench
                .controller
                .execute_reservation_command(now, ORIGIN, &command, &mut data)
                .unwrap()
                .status
        })
    };
    assert_eq!(status(None), [Status::HOST_IDENTIFIER_NOT_INITIALIZED.with_dnr(); 2]);
    assert_eq!(status(Some(HostIdentity::Extended(1))), [Status::SUCCESS; 2]);
}

#[test]
fn hosts_with_64_bit_identifiers_get_short_reports() {
    let mut hosts = ThreeHostsFixture::with_identities(|host| HostIdentity::Short(host.into()));
    hosts.register(2).unwrap();
    let report = ReservationReport { nsid: 1, numd: 63, eds: false, disnsrs: false };
    let bytes = hosts.run_command(1, &report.to_command(), &[]).unwrap();
    assert_eq!(ReservationStatus::parse(&bytes).unwrap().regstrnt(), 1);
    let rows: Vec<_> =
        report_registrants(&bytes).map(|row| (row.cntlid(), row.hostid(), row.rkey())).collect();
    assert_eq!(rows, [(2, 2, 2)]);
    let extended = ReservationReport { eds: true, ..report };
    let inconsistent = Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
    assert_eq!(hosts.run_command(1, &extended.to_command(), &[]), inconsistent);
}

#[test]
fn registrant_without_a_controller_is_reported_with_cntlid_ffff() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(2).unwrap();
    let ThreeHostsFixture { bench, others: [second, third] } = hosts;
    drop(second);
    let mut hosts = ThreeHostsFixture { others: [bench.open_second_controller(9), third], bench };
    let report = ReservationReport { nsid: 1, numd: 63, eds: true, disnsrs: false };
    let bytes = hosts.run_command(1, &report.to_command(), &[]).unwrap();
    let cntlids: Vec<u16> = report_registrants_extended(&bytes).map(|row| row.cntlid()).collect();
    assert_eq!(cntlids, [0xffff]);
}

#[test]
fn preempt_and_abort_aborts_commands_and_notifies_the_victim() {
    let mut hosts = ThreeHostsFixture::new();
    for host in [1, 2, 3] {
        hosts.register(host).unwrap();
    }
    hosts.acquire(2, ReservationType::WriteExclusiveRegistrants).unwrap();
    let now = hosts.bench.now;
    let request = AsynchronousEventRequest {}.to_command();
    submit_to_controller(&mut hosts.others[0], now, &request, &[]);
    let preempt = ReservationAcquire { racqa: AcquireAction::PreemptAndAbort, ..ACQUIRE };
    let mut keys = AcquireKeys::zeroed().with(|keys| keys.crkey(1).prkey(2)).as_bytes().to_vec();
    let issuer = &mut hosts.bench.controller;
    assert_eq!(
        issuer.execute_reservation_command(now, ORIGIN, &preempt.to_command(), &mut keys),
        None
    );
    hosts.poll();
    assert!(hosts.visible_reservation(1).is_some_and(|seen| seen.is_holder));
    assert!(hosts.visible_reservation(2).is_some_and(|seen| !seen.is_registrant));
    let victim = &mut hosts.others[0];
    let signal = victim.next_transport_action();
    assert!(matches!(signal, Some(TransportAction::AbortNamespace { nsid: 1, .. })));
    assert_eq!(victim.next_async_event_dword0(), Some(0x80_0006));
    assert_eq!(
        hosts.bench.controller.next_reservation_completion(),
        None,
        "its queues have not looked"
    );
    drop(signal);
    hosts.poll();
    let reservation_completions = ReservationCompletion { from: ORIGIN, end: AdminResult::OK };
    assert_eq!(hosts.bench.controller.next_reservation_completion(), Some(reservation_completions));
    assert_eq!(hosts.bench.controller.next_transport_action(), None, "the issuer goes on");

    let page = GetLogPage::new(LogPage::ReservationNotification.code(), 64).to_command();
    let read = |controller: &mut Controller| {
        let bytes = submit_to_controller(controller, now, &page, &[]).1;
        let page = ReservationNotification::parse(&bytes).unwrap();
        (page.lpc(), page.rnlpt(), page.nalp(), page.nsid())
    };
    let reported = (1, ReservationEvent::RegistrationPreempted, 1, 1);
    assert_eq!(read(&mut hosts.others[0]), reported);
    assert_eq!(read(&mut hosts.others[0]), (0, ReservationEvent::None, 0, 0), "read once");
    let reported = (1, ReservationEvent::ReservationReleased, 1, 1);
    assert_eq!(read(&mut hosts.others[1]), reported, "the type has changed");
}

#[test]
fn preempt_and_abort_waits_for_queues_of_a_resetting_controller() {
    let mut hosts = ThreeHostsFixture::new();
    for host in [1, 2] {
        hosts.register(host).unwrap();
    }
    let now = hosts.bench.now;
    let preempt = ReservationAcquire { racqa: AcquireAction::PreemptAndAbort, ..ACQUIRE };
    let mut keys = AcquireKeys::zeroed().with(|keys| keys.crkey(1).prkey(2)).as_bytes().to_vec();
    let issuer = &mut hosts.bench.controller;
    assert_eq!(
        issuer.execute_reservation_command(now, ORIGIN, &preempt.to_command(), &mut keys),
        None
    );
    hosts.poll();
    let victim = &mut hosts.others[0];
    victim.reset(now);
    let signal = victim.next_transport_action();
    assert!(matches!(signal, Some(TransportAction::AbortNamespace { nsid: 1, .. })), "they stop");
    hosts.poll();
    assert_eq!(hosts.bench.controller.next_reservation_completion(), None);
    assert!(hosts.bench.controller.wake_at(now) < now.after(Span::from_ms(2)));
    drop(signal);
    hosts.poll();
    assert!(hosts.bench.controller.next_reservation_completion().is_some());
    assert_eq!(hosts.bench.controller.next_reservation_completion(), None);
    let idle = hosts.bench.controller.wake_at(now);
    assert!(idle > now.after(Span::from_ms(2)), "{idle:?}");
}

#[test]
fn reservation_notifications_are_masked_by_type_or_queued() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(1).unwrap();
    hosts.register(2).unwrap();
    let now = hosts.bench.now;
    let mask = SetFeatures {
        nsid: 1,
        fid: Feature::ReservationNotificationMask.code(),
        cdw11: 1 << 2,
        ..SetFeatures::default()
    };
    let waiting = |hosts: &mut ThreeHostsFixture| {
        hosts.poll();
        let page = GetLogPage {
            rae: true,
            ..GetLogPage::new(LogPage::ReservationNotification.code(), 64)
        };
        submit_to_controller(&mut hosts.others[0], now, &page.to_command(), &[]).1[9]
    };
    let rtype = ReservationType::WriteExclusiveRegistrants;
    let release = ReservationRelease { rtype, ..RELEASE };
    hosts.acquire(1, rtype).unwrap();
    hosts.release(1, release).unwrap();
    assert_eq!(waiting(&mut hosts), 1);
    submit_to_controller(&mut hosts.others[0], now, &mask.to_command(), &[]);
    hosts.acquire(1, rtype).unwrap();
    hosts.release(1, release).unwrap();
    assert_eq!(waiting(&mut hosts), 1, "releases are masked");
    hosts.release(1, ReservationRelease { rrela: ReleaseAction::Clear, ..RELEASE }).unwrap();
    assert_eq!(waiting(&mut hosts), 2, "a clear is not");
}

#[test]
fn hidden_namespace_sends_no_reservation_notification() {
    let mut hosts = ThreeHostsFixture::new();
    for host in [1, 2, 3] {
        hosts.register(host).unwrap();
    }
    hosts.bench.subsystem.set_namespace_visible(2, 1, false);
    hosts.release(1, ReservationRelease { rrela: ReleaseAction::Clear, ..RELEASE }).unwrap();
    hosts.poll();
    let now = hosts.bench.now;
    let page = GetLogPage::new(LogPage::ReservationNotification.code(), 64).to_command();
    let waiting =
        hosts.others.each_mut().map(|other| submit_to_controller(other, now, &page, &[]).1[9]);
    assert_eq!(waiting, [0, 1]);
}

#[test]
fn unread_reservation_notifications_are_bounded() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(1).unwrap();
    hosts.register(2).unwrap();
    let rtype = ReservationType::WriteExclusiveRegistrants;
    for round in 0..600 {
        hosts.acquire(1, rtype).unwrap();
        hosts.release(1, ReservationRelease { rtype, ..RELEASE }).unwrap();
        if round == 300 {
            hosts.poll();
        }
    }
    hosts.poll();
    let now = hosts.bench.now;
    let page = GetLogPage::new(LogPage::ReservationNotification.code(), 64).to_command();
    let waiting = submit_to_controller(&mut hosts.others[0], now, &page, &[]).1[9];
    assert_eq!(waiting, 255);
}

#[test]
fn reservation_restricts_admin_commands_of_other_hosts() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(2).unwrap();
    hosts.acquire(2, ReservationType::WriteExclusive).unwrap();
    let format = FormatNvm { nsid: 1, ..FormatNvm::default() };
    assert_eq!(hosts.bench.run_without_data(format), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(hosts.bench.shelves[0].nonzero_blocks(), 2048);
}

#[test]
fn persistent_reservation_survives_power_loss() {
    for (cptpl, survives) in [(ChangePersistence::Persist, true), (ChangePersistence::Clear, false)]
    {
        let mut hosts = ThreeHostsFixture::new();
        let register = ReservationRegister { cptpl, ..REGISTER };
        let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(1));
        hosts.run_command(1, &register.to_command(), keys.as_bytes()).unwrap();
        hosts.acquire(1, ReservationType::WriteExclusive).unwrap();
        let persistence = GetFeatures {
            nsid: 1,
            fid: Feature::ReservationPersistence.code(),
            ..GetFeatures::default()
        };
        assert_eq!(hosts.bench.run_without_data(persistence), Ok(u32::from(survives)));
        hosts.bench.subsystem.emulate_power_cycle();
        assert_eq!(hosts.visible_reservation(1).is_some(), survives);
    }
}

#[test]
fn reservation_persistence_feature_sets_persistence() {
    let mut hosts = ThreeHostsFixture::new();
    hosts.register(1).unwrap();
    hosts.acquire(1, ReservationType::WriteExclusive).unwrap();
    let set = SetFeatures {
        nsid: 1,
        fid: Feature::ReservationPersistence.code(),
        cdw11: 1,
        ..SetFeatures::default()
    };
    hosts.bench.run_without_data(set).unwrap();
    hosts.bench.subsystem.emulate_power_cycle();
    assert!(hosts.visible_reservation(1).is_some());
}

#[test]
fn anonymous_host_loses_its_registration_at_reset() {
    let mut bench = ControllerFixture::new();
    let other = bench.open_second_controller(2);
    let keys = *RegisterKeys::zeroed().with(|keys| keys.nrkey(1)).as_bytes();
    bench.controller.execute_reservation_command(
        bench.now,
        ORIGIN,
        &REGISTER.to_command(),
        &mut keys.to_vec(),
    );
    let keys = *AcquireKeys::zeroed().with(|keys| keys.crkey(1)).as_bytes();
    bench.controller.execute_reservation_command(
        bench.now,
        ORIGIN,
        &ACQUIRE.to_command(),
        &mut keys.to_vec(),
    );
    let seen = || other.namespaces().reader().get().get(1).unwrap().reservation;
    assert!(seen().is_some());
    bench.controller.reset(bench.now);
    assert_eq!(seen(), None);
}

#[test]
fn reservation_commands_are_rejected_where_not_supported() {
    let mut bench = ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        |config| config.reservations = false,
        ControllerConfig::default(),
    );
    let command = REGISTER.to_command();
    let refused =
        bench.controller.reservation_data_length(&command).map_err(Status::without_crd_more_dnr);
    assert_eq!(refused, Err(Status::INVALID_OPCODE));
    let end =
        bench.controller.execute_reservation_command(bench.now, ORIGIN, &command, &mut vec![0; 16]);
    assert!(end.unwrap().status.has_same_code_as(Status::INVALID_OPCODE));
}
