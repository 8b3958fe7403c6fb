//! Authentication of hosts: what an authenticated one may do, and that another one may do nothing.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Span;
use tenmil_nvme_auth::{
    Concatenation, Group, Hash, Host, HostConfig, Message, Policy, SECURITY_PROTOCOL,
};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{
    AuthenticationReceive, AuthenticationSend, CNTLID_DYNAMIC, ConnectData, Connected, PropertySize,
};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand, nqn};

use super::authenticating_host::{
    BUFFER_BYTES, DeferredDhExecutor, ExchangeResult, OF_CONTROLLER, OF_HOST, fast_policy,
    host_config, host_keys, named_secret, random_bytes, randomness, secret, secured_target,
    security,
};
use super::test_target::{
    ENABLED, HOST, TestTarget, admin_config, admin_connect, connect_data, io_config, io_connect,
    read_or_write_command, service_limits,
};
use crate::tcp::security::REMOVAL_GRACE;
use crate::tcp::{
    ControllerModel, DisconnectReason, SubsystemExportConfig, SubsystemSecurity, TargetEvent,
};

const REQUIRED: Status = Status::AUTHENTICATION_REQUIRED.with_dnr();

/// Each hash function and some groups, in both directions.
#[test]
fn authenticated_host_uses_its_controller() {
    let groups = [(Group::Null, true), (Group::Ffdhe2048, true), (Group::Ffdhe2048, false)];
    for (hash, (group, is_bidirectional)) in Hash::ALL.into_iter().zip(groups) {
        let policy = Policy { hashes: vec![hash], groups: vec![group], ..Policy::default() };
        let offered = SubsystemSecurity { policy: policy.clone(), ..security(&[OF_HOST]) };
        let mut rig = secured_target(offered);
        let controller_secrets =
            is_bidirectional.then(|| secret(OF_CONTROLLER)).into_iter().collect();
        let config = HostConfig { policy, controller_secrets, ..host_config() };
        let (admin, cntlid) = rig.connect_authenticated_admin(config.clone());
        assert_eq!(rig.service.association_count(), 1);
        let io = rig.connect_authenticated_io((cntlid, 1), config);
        assert_eq!(rig.write_block(io, 1), Status::SUCCESS);
        let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
        let (completion, bytes) =
            rig.execute_command(admin, &identify, DataDirection::ToHost(4096), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert_eq!(bytes[78..80], cntlid.to_le_bytes(), "the identifier that Connect returned");
        rig.end_all();
    }
}

#[test]
fn host_without_a_secret_is_not_asked_unless_authentication_is_required() {
    let mut rig = secured_target(SubsystemSecurity {
        hosts: BTreeMap::from([("nqn.2026-01.org.tenmil:other".to_owned(), host_keys(&[OF_HOST]))]),
        ..SubsystemSecurity::default()
    });
    rig.connect_admin_queue();
    rig.set_security(SubsystemSecurity { authentication_required: true, ..security(&[]) });
    assert_eq!(rig.service.association_count(), 0, "it has not authenticated");
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    assert!(
        rig.new_events.iter().any(|event| event.to_string().contains("no DH-HMAC-CHAP secret of")),
        "{:?}",
        rig.new_events
    );
    rig.end_all();
}

/// All commands that a connection can carry: each opcode, and each type of fabrics command.
fn all_commands() -> impl Iterator<Item = Command> {
    let fabrics = AdminOpcode::FabricsCommands.code();
    let opcodes = (0..=u8::MAX).filter(move |opcode| *opcode != fabrics).map(Command::new);
    let is_authentication = |kind: &u32| matches!(kind, 5 | 6);
    let kinds = (0..=255_u32).filter(move |kind| !is_authentication(kind));
    opcodes.chain(kinds.map(move |kind| Command::new(fabrics).with_nsid(kind)))
}

/// Data of a command, whose direction is in its opcode or type (Base 2.2 §3.3.3.1).
fn data_of_command(command: &Command) -> DataDirection {
    let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
    let code = if is_fabrics { command.nsid() } else { command.opcode().into() };
    match code & 3 {
        1 => DataDirection::FromHost(512),
        2 => DataDirection::ToHost(4096),
        _ => DataDirection::None,
    }
}

/// Sends every command, without and with data, and checks that each is rejected.
fn assert_all_commands_rejected(rig: &mut TestTarget, line: usize, state: &str) {
    assert_commands_rejected(rig, line, state, true);
}

fn assert_commands_rejected(rig: &mut TestTarget, line: usize, state: &str, with_data: bool) {
    let controllers = rig.service.association_count();
    for command in all_commands() {
        let with_data = with_data.then(|| data_of_command(&command));
        for data in [Some(DataDirection::None), with_data].into_iter().flatten() {
            let bytes = match data {
                DataDirection::FromHost(len) => vec![0; len as usize],
                _ => Vec::new(),
            };
            let (completion, back) = rig.execute_command(line, &command, data, &bytes);
            let what = format!("{command:?} {state}");
            assert_eq!(completion.status(), REQUIRED, "{what}");
            assert_eq!(completion.result(), 0, "{what}");
            assert!(back.iter().all(|byte| matches!(byte, 0 | 0xa5)), "{what} returns no data");
        }
    }
    assert_eq!(rig.service.association_count(), controllers, "{state}");
}

#[test]
fn every_command_before_authentication_is_rejected_in_every_state() {
    let policy = Policy { groups: vec![Group::Ffdhe2048], ..fast_policy() };
    let offered = SubsystemSecurity { policy: policy.clone(), ..security(&[OF_HOST]) };
    let mut rig = secured_target(offered);
    let executor = DeferredDhExecutor::install(&rig);
    let config =
        HostConfig { policy, controller_secrets: vec![secret(OF_CONTROLLER)], ..host_config() };
    for is_io in [false, true] {
        let controllers = usize::from(is_io);
        let mut host = Host::new(config.clone()).unwrap();
        let line = match is_io {
            false => rig.connect_unauthenticated().0,
            true => {
                executor_runs_at_once(&rig);
                let (_, cntlid) = rig.connect_authenticated_admin(config.clone());
                rig.service.set_dh_executor(executor.clone());
                let line = rig.open_connection(io_config());
                rig.execute_connect(line, &io_connect(1), &connect_data(cntlid));
                line
            }
        };
        assert_all_commands_rejected(&mut rig, line, "before NEGOTIATE");
        let negotiate = host.start(randomness(1));
        assert_eq!(rig.send_message(line, &negotiate), Some(Status::SUCCESS));
        assert_all_commands_rejected(&mut rig, line, "while the public value is computed");
        let receive = rig.submit_receive(line);
        assert!(!rig.lines[line].done.contains_key(&receive), "it waits for the job");
        // The Receive has the pages of the connection, for which commands with data wait.
        assert_commands_rejected(&mut rig, line, "while a Receive waits", false);
        executor.run_all();
        rig.run_until_idle();
        let (_, challenge) = rig.lines[line].done.remove(&receive).unwrap();
        assert_all_commands_rejected(&mut rig, line, "after CHALLENGE");
        let tenmil_nvme_auth::Step::Compute(job) = host.handle_message(&challenge) else {
            panic!("it needs the shared secret");
        };
        let Some(tenmil_nvme_auth::Step::Message(reply)) = host.handle_dh_result(job.run()) else {
            panic!("it replies");
        };
        assert_eq!(rig.send_message(line, &reply), Some(Status::SUCCESS));
        assert_all_commands_rejected(&mut rig, line, "while the shared secret is computed");
        executor.run_all();
        rig.run_until_idle();
        assert_all_commands_rejected(&mut rig, line, "before SUCCESS1 is received");
        let success1 = rig.receive_message(line).unwrap().unwrap();
        assert_all_commands_rejected(&mut rig, line, "before SUCCESS2");
        assert_eq!(rig.service.association_count(), controllers, "there is no controller yet");
        let step = host.handle_message(&success1);
        let tenmil_nvme_auth::Step::Authenticated { message: Some(success2), .. } = step else {
            panic!("{step:?}");
        };
        assert_eq!(rig.send_message(line, &success2), Some(Status::SUCCESS));
        assert_eq!(rig.service.association_count(), 1);
        if !is_io {
            let value = rig.get_property(line, offset::VS, PropertySize::Four);
            assert_eq!(value.status(), Status::SUCCESS);
        }
        rig.end_all();
    }
}

fn executor_runs_at_once(rig: &TestTarget) {
    rig.service.set_dh_executor(std::sync::Arc::new(tenmil_nvme_auth::InlineDhExecutor));
}

#[test]
fn no_command_is_served_after_a_failure() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    assert_eq!(rig.send_message(line, b"nonsense"), Some(Status::SUCCESS));
    assert_all_commands_rejected(&mut rig, line, "before FAILURE1 is received");
    let negotiate = Host::new(host_config()).unwrap().start(randomness(1));
    assert_eq!(
        rig.send_message(line, &negotiate),
        Some(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
        "the exchange has failed"
    );
    let failure = rig.receive_message(line).unwrap().unwrap();
    assert!(matches!(Message::decode(&failure), Ok(Message::Failure1(_))), "{failure:?}");
    assert_eq!(rig.service.connection_count(), 0, "the connection ends with it");
    rig.end_all();
}

#[test]
fn wrong_secret_hash_or_group_is_refused_and_reported() {
    let config = host_config();
    let cases: [(HostConfig, &str); 4] = [
        (HostConfig { host_secret: secret(99), ..config.clone() }, "does not match"),
        (
            HostConfig {
                policy: Policy { hashes: vec![Hash::Sha512], ..fast_policy() },
                ..config.clone()
            },
            "hash function not usable",
        ),
        (
            HostConfig {
                policy: Policy { groups: vec![Group::Ffdhe8192], ..fast_policy() },
                ..config.clone()
            },
            "group not usable",
        ),
        (
            HostConfig {
                policy: Policy {
                    groups: vec![Group::Ffdhe2048],
                    hashes: vec![Hash::Sha256],
                    ..Policy::default()
                },
                concatenation: Concatenation::NewTlsPsk,
                ..config
            },
            "concatenation",
        ),
    ];
    for (config, text) in cases {
        let mut rig = secured_target(security(&[OF_HOST]));
        let (line, _) = rig.connect_unauthenticated();
        let result = rig.authenticate(line, config);
        assert!(matches!(result, ExchangeResult::Failed(_)), "{text}: {result:?}");
        let ends = |event: &TargetEvent| match event {
            TargetEvent::Disconnected {
                reason: DisconnectReason::AuthenticationFailed(why),
                ..
            } => why.contains(text),
            _ => false,
        };
        rig.run_until_idle();
        assert!(rig.new_events.iter().any(ends), "{text}: {:?}", rig.new_events);
        assert_eq!(rig.service.connection_count(), 0);
        rig.end_all();
    }
}

/// A host that knows the controller's secret is not deceived by a target without it.
#[test]
fn target_without_the_controller_secret_is_refused_by_the_host() {
    let mut keys = host_keys(&[OF_HOST]);
    keys.controller_secret = Some(named_secret(77));
    let hosts = BTreeMap::from([(HOST.to_owned(), keys)]);
    let mut rig = secured_target(SubsystemSecurity { hosts, ..security(&[]) });
    let (line, _) = rig.connect_unauthenticated();
    let config = HostConfig { controller_secrets: vec![secret(OF_CONTROLLER)], ..host_config() };
    let result = rig.authenticate(line, config);
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 0);
    assert_eq!(rig.service.connection_count(), 0, "FAILURE2 ends the connection");
    rig.end_all();
}

#[test]
fn invalid_fields_of_authentication_commands_are_rejected() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let message = Host::new(host_config()).unwrap().start(randomness(1));
    let len = u32::try_from(message.len()).unwrap();
    let send = AuthenticationSend { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, tl: len };
    let receive =
        AuthenticationReceive { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, al: BUFFER_BYTES };
    let field = Status::INVALID_FIELD.with_dnr();
    let length = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
    for (send, expected) in [
        (AuthenticationSend { secp: 0xe8, ..send }, field),
        (AuthenticationSend { spsp0: 0, ..send }, field),
        (AuthenticationSend { spsp1: 2, ..send }, field),
        (AuthenticationSend { tl: 0, ..send }, field),
        (AuthenticationSend { tl: 8193, ..send }, field),
        (AuthenticationSend { tl: len - 1, ..send }, length),
        (AuthenticationSend { tl: len + 1, ..send }, length),
    ] {
        let command = send.to_command();
        let (completion, _) =
            rig.execute_command(line, &command, DataDirection::FromHost(len), &message);
        assert_eq!(completion.status(), expected, "{send:?}");
    }
    let (completion, _) = rig.execute_command(line, &send.to_command(), DataDirection::None, &[]);
    assert_eq!(completion.status(), length, "no data");
    assert_eq!(rig.send_message(line, &message), Some(Status::SUCCESS));
    for (receive, data, expected) in [
        (AuthenticationReceive { secp: 1, ..receive }, BUFFER_BYTES, field),
        (AuthenticationReceive { spsp0: 0, ..receive }, BUFFER_BYTES, field),
        (AuthenticationReceive { spsp1: 0, ..receive }, BUFFER_BYTES, field),
        (AuthenticationReceive { al: 0, ..receive }, BUFFER_BYTES, field),
        (AuthenticationReceive { al: 8, ..receive }, 8, field),
        (AuthenticationReceive { al: 4096, ..receive }, 512, length),
    ] {
        let data = DataDirection::ToHost(data);
        let (completion, _) = rig.execute_command(line, &receive.to_command(), data, &[]);
        assert_eq!(completion.status(), expected, "{receive:?}");
    }
    let challenge = rig.receive_message(line).unwrap().unwrap();
    assert!(matches!(Message::decode(&challenge), Ok(Message::Challenge(_))), "it is still there");
    rig.end_all();
}

#[test]
fn io_queue_needs_an_authenticated_admin_queue_and_an_authentication_of_its_own() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (admin, connected) = rig.connect_unauthenticated();
    let io = rig.open_connection(io_config());
    let data = connect_data(connected.cntlid());
    let completion = rig.execute_connect(io, &io_connect(1), &data);
    assert_eq!(completion.status(), Status::CONNECT_INVALID_PARAMETERS.with_dnr(), "no controller");
    rig.authenticate(admin, host_config()).outcome();
    rig.set_property(admin, offset::CC, ENABLED);
    let completion = rig.execute_connect(io, &io_connect(1), &data);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert!(Connected(completion.dw0()).authentication_required());
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let (completion, _) = rig.execute_command(io, &read, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), REQUIRED);
    let result = rig.authenticate(io, HostConfig { host_secret: secret(9), ..host_config() });
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    assert_eq!(rig.service.association_count(), 1, "the controller is unharmed");
    let io = rig.connect_authenticated_io((connected.cntlid(), 1), host_config());
    assert_eq!(rig.write_block(io, 3), Status::SUCCESS);
    rig.end_all();
}

/// Two connections claim the same I/O queue before either has authenticated.
#[test]
fn queue_identifier_belongs_to_the_connection_that_authenticates_first() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (_, cntlid) = rig.connect_authenticated_admin(host_config());
    let lines = [(); 2].map(|()| {
        let line = rig.open_connection(io_config());
        let completion = rig.execute_connect(line, &io_connect(1), &connect_data(cntlid));
        assert_eq!(completion.status(), Status::SUCCESS);
        line
    });
    rig.authenticate(lines[1], host_config()).outcome();
    let mut host = Host::new(host_config()).unwrap();
    let tag_before = rig.lines[lines[0]].done.len();
    let result = rig.run_exchange(lines[0], &mut host, 5, &mut |_, _| {});
    assert!(matches!(result, ExchangeResult::Disconnected), "it waits: {result:?} {tag_before}");
    rig.advance_time(Span::from_secs(2));
    let refused = |event: &TargetEvent| match event {
        TargetEvent::Disconnected { reason: DisconnectReason::Refused(why), .. } => {
            why.contains("queue 1")
        }
        _ => false,
    };
    assert!(rig.new_events.iter().any(refused), "{:?}", rig.new_events);
    assert_eq!(rig.write_block(lines[1], 3), Status::SUCCESS);
    rig.end_all();
}

#[test]
fn io_queues_without_authentication_belong_to_the_admin_queue() {
    let offered = SubsystemSecurity { authenticate_io_queues: false, ..security(&[OF_HOST]) };
    let mut rig = secured_target(offered);
    rig.traits.peer = Some("192.0.2.1:1".parse().unwrap());
    let (_, cntlid) = rig.connect_authenticated_admin(host_config());
    let connect = |rig: &mut TestTarget, qid, data: &ConnectData| {
        let line = rig.open_connection(io_config());
        (line, rig.execute_connect(line, &io_connect(qid), data))
    };
    let (io, completion) = connect(&mut rig, 1, &connect_data(cntlid));
    assert_eq!(completion.status(), Status::SUCCESS);
    assert!(!Connected(completion.dw0()).authentication_required());
    assert_eq!(rig.write_block(io, 1), Status::SUCCESS);
    // A peer that only knows the names.
    let unidentified = connect_data(cntlid).with(|data| data.hostid([0; 16]));
    let (_, completion) = connect(&mut rig, 2, &unidentified);
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    rig.traits.peer = Some("192.0.2.2:1".parse().unwrap());
    let (_, completion) = connect(&mut rig, 2, &connect_data(cntlid));
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    rig.end_all();
}

/// Base 2.2: an authenticated host has one host identifier.
#[test]
fn authenticated_host_has_one_host_identifier() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (first, _) = rig.connect_authenticated_admin(host_config());
    let other: ConnectData = connect_data(CNTLID_DYNAMIC).with(|data| data.hostid([8; 16]));
    let connect = |rig: &mut TestTarget| {
        let line = rig.open_connection(admin_config());
        assert_eq!(rig.execute_connect(line, &admin_connect(), &other).status(), Status::SUCCESS);
        let mut host = Host::new(host_config()).unwrap();
        rig.run_exchange(line, &mut host, 5, &mut |_, _| {})
    };
    let result = connect(&mut rig);
    assert!(
        matches!(result, ExchangeResult::Rejected(Status::CONNECT_INVALID_PARAMETERS)),
        "{result:?}"
    );
    assert!(
        rig.new_events
            .iter()
            .any(|event| event.to_string().contains("as for its other controllers")),
        "{:?}",
        rig.new_events
    );
    rig.lines[first].pipe = None;
    rig.run_until_idle();
    connect(&mut rig).outcome();
    rig.end_all();
}

/// Hosts that do not authenticate hold no controller of a static subsystem.
#[test]
fn unauthenticated_hosts_hold_no_controller() {
    let mut rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        security: security(&[OF_HOST]),
        model: ControllerModel::Static(1),
        ..config
    });
    let waiting: Vec<_> = (0..5).map(|_| rig.connect_unauthenticated().0).collect();
    assert_eq!(rig.service.association_count(), 0);
    rig.authenticate(waiting[3], host_config()).outcome();
    assert_eq!(rig.service.association_count(), 1);
    // The only controller is in use now.
    let mut host = Host::new(host_config()).unwrap();
    let result = rig.run_exchange(waiting[1], &mut host, 9, &mut |_, _| {});
    assert!(
        matches!(result, ExchangeResult::Rejected(Status::CONNECT_CONTROLLER_BUSY)),
        "{result:?}"
    );
    rig.end_all();
}

#[test]
fn discovery_requires_authentication_if_configured() {
    let mut rig = TestTarget::new();
    rig.set_discovery_security(security(&[OF_HOST]));
    let data = || -> ConnectData {
        connect_data(CNTLID_DYNAMIC).with(|data| data.subnqn(Ascii::nul_padded(nqn::DISCOVERY)))
    };
    let config = HostConfig { subsystem_nqn: nqn::DISCOVERY.to_owned(), ..host_config() };
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, &admin_connect(), &data());
    assert!(Connected(completion.dw0()).authentication_required());
    assert_all_commands_rejected(&mut rig, line, "of discovery");
    rig.authenticate(line, config.clone()).outcome();
    rig.set_property(line, offset::CC, ENABLED);
    let log = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(255 << 16 | 0x70);
    let (completion, _) = rig.execute_command(line, &log, DataDirection::ToHost(1024), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.authenticate(line, config).outcome();
    rig.set_discovery_security(security(&[4]));
    rig.advance_time(REMOVAL_GRACE);
    assert_eq!(rig.service.connection_count(), 0, "its secret was removed");
    rig.end_all();
}

#[test]
fn half_done_authentication_ends_by_its_time_limit() {
    for messages in 0..4 {
        let mut rig = secured_target(security(&[OF_HOST]));
        let (line, _) = rig.connect_unauthenticated();
        let mut host = Host::new(host_config()).unwrap();
        let negotiate = host.start(randomness(1));
        if messages > 0 {
            rig.send_message(line, &negotiate);
        }
        if messages > 1 {
            let challenge = rig.receive_message(line).unwrap().unwrap();
            if messages > 2
                && let tenmil_nvme_auth::Step::Message(reply) = host.handle_message(&challenge)
            {
                rig.send_message(line, &reply);
            }
        }
        rig.advance_time(Span::from_secs(29));
        assert_eq!(rig.service.connection_count(), 1, "{messages} messages");
        rig.advance_time(Span::from_secs(2));
        assert_eq!(rig.service.connection_count(), 0, "{messages} messages");
        let is_timeout = |event: &TargetEvent| {
            matches!(
                event,
                TargetEvent::Disconnected { reason: DisconnectReason::Timeout("authenticate"), .. }
            )
        };
        assert!(rig.new_events.iter().any(is_timeout), "{:?}", rig.new_events);
        rig.end_all();
    }
}

#[test]
fn job_that_the_executor_drops_ends_the_connection() {
    let policy = Policy { groups: vec![Group::Ffdhe2048], ..fast_policy() };
    let mut rig =
        secured_target(SubsystemSecurity { policy: policy.clone(), ..security(&[OF_HOST]) });
    let executor = DeferredDhExecutor::install(&rig);
    let (line, _) = rig.connect_unauthenticated();
    let config = HostConfig { policy, ..host_config() };
    let negotiate = Host::new(config).unwrap().start(randomness(1));
    rig.send_message(line, &negotiate);
    assert_eq!(executor.count(), 1);
    rig.submit_receive(line);
    executor.drop_all();
    rig.run_until_idle();
    assert_eq!(rig.service.connection_count(), 0);
    assert!(
        rig.new_events.iter().any(|event| event.to_string().contains("was not run")),
        "{:?}",
        rig.new_events
    );
    rig.end_all();
}

#[test]
fn target_without_random_numbers_authenticates_nobody() {
    let mut rig = secured_target(security(&[OF_HOST]));
    rig.service.set_random_source(|_| false);
    let (line, _) = rig.connect_unauthenticated();
    let result = rig.authenticate(line, host_config());
    assert!(
        matches!(result, ExchangeResult::Rejected(_) | ExchangeResult::Disconnected),
        "{result:?}"
    );
    rig.run_until_idle();
    assert_eq!(rig.service.connection_count(), 0);
    rig.end_all();
}

/// Nothing that is written down holds a secret.
#[test]
fn no_event_or_debug_text_holds_a_secret() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let mut texts = vec![format!("{:?} {:?}", rig.guests, security(&[OF_HOST]))];
    rig.authenticate(line, host_config()).outcome();
    let (line, _) = rig.connect_unauthenticated();
    rig.authenticate(line, HostConfig { host_secret: secret(9), ..host_config() });
    texts.extend(rig.new_events.iter().map(|event| format!("{event} {event:?}")));
    let bytes = random_bytes(OF_HOST, 32);
    let text = secret(OF_HOST).to_text();
    let forms: BTreeSet<String> = BTreeSet::from([
        text[10..30].to_owned(),
        format!("{:?}", &bytes[..8]).trim_matches(['[', ']']).to_owned(),
        bytes[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
    ]);
    for form in &forms {
        assert!(!texts.iter().any(|text| text.contains(form.as_str())), "{form}");
    }
    rig.end_all();
}
