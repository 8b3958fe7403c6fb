//! TLS connections at the target, as their identities show them, and secure channel concatenation.

use tenmil_base::{SecureChannel, Span};
use tenmil_nvme_auth::{
    Authenticated, Concatenation, ConcatenationPolicy, Group, Hash, Host, HostConfig, Policy,
    SecretBytes, TlsPsk, tls_psk_candidates,
};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, ConnectData, Connected, PropertySize};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, Status};

use super::authenticating_host::{
    ExchangeResult, OF_CONTROLLER, OF_HOST, fast_policy, host_config, named_secret, psk,
    random_bytes, secret, secured_target, security, with_psks,
};
use super::test_target::{
    ENABLED, HOST, NQN, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect,
};
use crate::tcp::security::REMOVAL_GRACE;
use crate::tcp::{
    ConnectionAudit, ConnectionSample, DisconnectReason, Port, PortSecurity, RefusalReason,
    SubsystemSecurity, TargetEvent,
};

const OTHER: &str = "nqn.2026-01.org.tenmil:other";

fn tls_target(security: SubsystemSecurity) -> TestTarget {
    let rig = secured_target(security);
    rig.service.add_port(1, Port { security: PortSecurity::TlsAllowed, ..Port::default() });
    rig
}

fn identities(seed: u64) -> Vec<String> {
    let candidates = tls_psk_candidates(&[psk(seed)], HOST, NQN);
    candidates.into_iter().map(|psk| psk.identity).collect()
}

/// Lets seconds pass while the host keeps its association alive.
fn pass_time(rig: &mut TestTarget, admin: usize, seconds: u64) {
    let step = 300;
    for passed in (0..seconds).step_by(300) {
        rig.advance_time(Span::from_secs(step.min(seconds - passed)));
        let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
        let (completion, _) = rig.execute_command(admin, &keep_alive, DataDirection::None, &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
    }
}

/// A policy for keys: they need a group.
fn key_policy() -> Policy {
    Policy { groups: vec![Group::Ffdhe2048], ..fast_policy() }
}

fn concatenating(concatenation: Concatenation) -> HostConfig {
    HostConfig { concatenation, policy: key_policy(), ..host_config() }
}

fn generated_psk(outcome: &Authenticated) -> TlsPsk {
    outcome.tls_psk(HOST, NQN).unwrap()
}

/// Connects in plaintext and generates a key. Returns the line and the key.
fn concatenate(rig: &mut TestTarget, seed: u64) -> (usize, TlsPsk) {
    let (line, connected) = rig.connect_unauthenticated();
    assert!(connected.authentication_required());
    let mut host = Host::new(concatenating(Concatenation::NewTlsPsk)).unwrap();
    let outcome = rig.run_exchange(line, &mut host, seed, &mut |_, _| {}).outcome();
    (line, generated_psk(&outcome))
}

/// Configured keys in both derivations and all versions, and nothing for another host.
#[test]
fn keys_of_an_identity_are_found_in_both_derivations_and_versions() {
    let rig = tls_target(with_psks(&[1, 2]));
    for seed in [1, 2] {
        let expected = tls_psk_candidates(&[psk(seed)], HOST, NQN);
        for candidate in &expected {
            let found = rig.service.tls_psks_of_identity(rig.now, &candidate.identity);
            assert!(found.contains(candidate), "{}", candidate.identity);
            assert!(found.iter().all(|psk| psk.identity == candidate.identity));
        }
    }
    let version_0 = format!("NVMe0R01 {HOST} {NQN}");
    // Two keys, in two derivations each.
    assert_eq!(rig.service.tls_psks_of_identity(rig.now, &version_0).len(), 4);
    for unknown in [
        format!("NVMe0R01 {OTHER} {NQN}"),
        format!("NVMe0R01 {HOST} {OTHER}"),
        format!("NVMe0R02 {HOST} {NQN}"),
        format!("NVMe0G01 {HOST} {NQN}"),
        format!("NVMe1R01 {HOST} {NQN} AAAA"),
        String::new(),
    ] {
        assert!(rig.service.tls_psks_of_identity(rig.now, &unknown).is_empty(), "{unknown}");
    }
}

#[test]
fn tls_connection_is_bound_to_the_names_of_its_identity() {
    let mut rig = tls_target(with_psks(&[1]));
    let any = CNTLID_DYNAMIC;
    for identity in identities(1) {
        let (line, completion) = rig.connect_over_tls(&identity, 0, &connect_data(any));
        assert_eq!(completion.status(), Status::SUCCESS, "{identity}");
        assert!(!Connected(completion.dw0()).authentication_required());
        rig.lines[line].pipe = None;
        rig.run_until_idle();
    }
    let identity = &identities(1)[0];
    let other_host = connect_data(any).with(|data| data.hostnqn(Ascii::nul_padded(OTHER)));
    let unnamed = connect_data(any).with(|data| data.hostnqn(Ascii::nul_padded("")));
    let discovery =
        connect_data(any).with(|data| data.subnqn(Ascii::nul_padded(tenmil_wire::nqn::DISCOVERY)));
    for data in [other_host, unnamed, discovery] {
        let (_, completion) = rig.connect_over_tls(identity, 0, &data);
        assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    }
    // Of the same key at another subsystem, which the host may use by it.
    for elsewhere in tls_psk_candidates(&[psk(1)], HOST, OTHER) {
        let (_, completion) = rig.connect_over_tls(&elsewhere.identity, 0, &connect_data(any));
        assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
        let refused = rig.new_events.iter().rev().find_map(|event| match event {
            TargetEvent::Rejected { reason, .. } => Some(*reason),
            _ => None,
        });
        assert_eq!(refused, Some(RefusalReason::IdentityMismatch), "{}", elsewhere.identity);
    }
    // An identity that is of no key: the handshake would not have succeeded.
    for identity in ["", "NVMe1R01 a b c", &format!("NVMe0R02 {HOST} {NQN}")] {
        let (_, completion) = rig.connect_over_tls(identity, 0, &connect_data(any));
        assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr(), "{identity}");
    }
    rig.end_all();
}

#[test]
fn plaintext_connection_is_refused_if_a_secure_channel_is_required() {
    let mut rig = tls_target(with_psks(&[1]));
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    let (_, completion) = rig.connect_over_tls(&identities(1)[0], 0, &connect_data(CNTLID_DYNAMIC));
    let cntlid = Connected(completion.dw0()).cntlid();
    let admin = rig.lines.len() - 1;
    rig.set_property(admin, offset::CC, ENABLED);
    let io = rig.open_connection(io_config());
    let completion = rig.execute_connect(io, &io_connect(1), &connect_data(cntlid));
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr(), "an I/O queue, too");
    let (io, completion) = rig.connect_over_tls(&identities(1)[0], 1, &connect_data(cntlid));
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(rig.write_block(io, 5), Status::SUCCESS);
    rig.end_all();
}

/// Not required by the subsystem: the I/O queue still needs what the admin queue has.
#[test]
fn plaintext_io_queue_of_a_tls_controller_is_refused() {
    let offered = SubsystemSecurity { secure_channel_required: false, ..with_psks(&[1]) };
    let mut rig = tls_target(offered);
    let (admin, completion) =
        rig.connect_over_tls(&identities(1)[0], 0, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(admin, offset::CC, ENABLED);
    let data = connect_data(Connected(completion.dw0()).cntlid());
    let io = rig.open_connection(io_config());
    let completion = rig.execute_connect(io, &io_connect(1), &data);
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    rig.end_all();
}

#[test]
fn port_that_requires_tls_accepts_no_plaintext_connection() {
    let rig = secured_target(SubsystemSecurity::default());
    rig.service.add_port(1, Port { security: PortSecurity::TlsRequired, ..Port::default() });
    let (_, far) = super::test_target::TestStream::pair(&rig.regions);
    let refused = rig.service.accept_stream(Box::new(far), 1, rig.now);
    assert!(refused.unwrap_err().to_string().contains("expected TLS"));
    let (_, far) = super::test_target::TestStream::pair(&rig.regions);
    let mut traits = rig.traits.clone();
    traits.channel =
        Some(SecureChannel { cipher_suite: "TLS_AES_128_GCM_SHA256", psk_identity: None });
    assert!(rig.service.accept_stream(Box::new(far.with_traits(&traits)), 1, rig.now).is_ok());
}

/// Of two configured keys one is removed: version 1 identities name their key, version 0 do not.
#[test]
fn connections_with_a_removed_psk_end() {
    let mut rig = tls_target(with_psks(&[1, 2]));
    let connect = |rig: &mut TestTarget, identity: &str| {
        let (line, completion) = rig.connect_over_tls(identity, 0, &connect_data(CNTLID_DYNAMIC));
        assert_eq!(completion.status(), Status::SUCCESS, "{identity}");
        line
    };
    let old = connect(&mut rig, &identities(1)[0]);
    let new = connect(&mut rig, &identities(2)[0]);
    let version_0 = connect(&mut rig, &format!("NVMe0R01 {HOST} {NQN}"));
    rig.set_security(with_psks(&[2]));
    assert_eq!(rig.service.association_count(), 1);
    let is_served = |rig: &mut TestTarget, line: usize| {
        rig.lines[line].submit(&Command::new(0x18), DataDirection::None, &[]);
        rig.run_until_idle();
        !rig.lines[line].done.is_empty()
    };
    assert!(is_served(&mut rig, new));
    assert!(!is_served(&mut rig, old) && !is_served(&mut rig, version_0));
    let (_, completion) = rig.connect_over_tls(&identities(1)[0], 0, &connect_data(CNTLID_DYNAMIC));
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    rig.end_all();
}

/// As from the kernel's keyring, where keys are derived for a host and a subsystem.
#[test]
fn keys_that_are_derived_already_are_found_by_their_identity_and_end_as_the_others() {
    let derived = |subsystem: &str| tls_psk_candidates(&[psk(3)], HOST, subsystem).remove(0);
    let with_derived = |psks: &[TlsPsk]| {
        let mut security = with_psks(&[1]);
        for keys in security.hosts.values_mut() {
            keys.tls_psks = psks.to_vec();
        }
        security
    };
    let mut rig = tls_target(with_derived(&[derived(NQN), derived(OTHER)]));
    let key = derived(NQN);
    assert_eq!(rig.service.tls_psks_of_identity(rig.now, &key.identity), vec![key.clone()]);
    let of_other = derived(OTHER).identity;
    assert!(rig.service.tls_psks_of_identity(rig.now, &of_other).is_empty(), "no such subsystem");
    let of_host = format!("NVMe1R01 {OTHER} {NQN} AAAA");
    assert!(rig.service.tls_psks_of_identity(rig.now, &of_host).is_empty());
    let (line, completion) = rig.connect_over_tls(&key.identity, 0, &connect_data(CNTLID_DYNAMIC));
    assert_eq!(completion.status(), Status::SUCCESS);
    let data = connect_data(CNTLID_DYNAMIC);
    let (configured, completion) = rig.connect_over_tls(&identities(1)[0], 0, &data);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.set_security(with_derived(&[]));
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 1, "that of the removed key has ended");
    for (line, is_served) in [(line, false), (configured, true)] {
        rig.lines[line].submit(&Command::new(0x18), DataDirection::None, &[]);
        rig.run_until_idle();
        assert_eq!(!rig.lines[line].done.is_empty(), is_served);
    }
    let (_, completion) = rig.connect_over_tls(&key.identity, 0, &data);
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    rig.end_all();
}

/// A host with a secret and a pre-shared key needs both, on each queue.
#[test]
fn configured_psk_does_not_replace_authentication() {
    let mut offered = with_psks(&[1]);
    for keys in offered.hosts.values_mut() {
        keys.chap_secrets = vec![named_secret(OF_HOST)];
    }
    offered.policy = fast_policy();
    let mut rig = tls_target(offered);
    let identity = &identities(1)[0];
    let (admin, completion) = rig.connect_over_tls(identity, 0, &connect_data(CNTLID_DYNAMIC));
    let connected = Connected(completion.dw0());
    assert!(connected.authentication_required() && !connected.secure_channel_required());
    rig.authenticate(admin, host_config()).outcome();
    rig.set_property(admin, offset::CC, ENABLED);
    let (io, completion) = rig.connect_over_tls(identity, 1, &connect_data(connected.cntlid()));
    assert!(Connected(completion.dw0()).authentication_required());
    rig.authenticate(io, host_config()).outcome();
    assert_eq!(rig.write_block(io, 5), Status::SUCCESS);
    rig.end_all();
}

/// TP 8018: the key of the authentication opens the TLS connection that replaces this one.
#[test]
fn generated_key_opens_a_tls_connection_for_an_hour() {
    let offered = SubsystemSecurity {
        secure_channel_required: true,
        policy: key_policy(),
        ..security(&[OF_HOST])
    };
    let mut rig = tls_target(offered);
    let (line, connected) = rig.connect_unauthenticated();
    assert!(connected.authentication_required() && connected.secure_channel_required());
    rig.lines[line].pipe = None;
    let (line, key) = concatenate(&mut rig, 1);
    let found = rig.service.tls_psks_of_identity(rig.now, &key.identity);
    assert_eq!(found, vec![key.clone()], "both ends have the same key");
    // The plaintext connection describes its controller, as Linux needs it, and does nothing else.
    assert_eq!(rig.set_property(line, offset::CC, ENABLED).status(), Status::SUCCESS);
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (completion, _) = rig.execute_command(line, &identify, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let denied = Status::OPERATION_DENIED.with_dnr();
    for opcode in (0..=255).filter(|opcode| *opcode != 0x7f) {
        let command = Command::new(opcode).with_nsid(1);
        let (completion, _) = rig.execute_command(line, &command, DataDirection::None, &[]);
        let is_served = matches!(opcode, 0x02 | 0x08 | 0x0a | 0x18);
        assert_eq!(completion.status() != denied, is_served, "opcode {opcode:#04x}");
    }
    let active = Command::new(AdminOpcode::Identify.code()).with_cdw10(2);
    let (completion, _) = rig.execute_command(line, &active, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), denied, "no namespace is shown");
    let io = rig.open_connection(io_config());
    let completion = rig.execute_connect(io, &io_connect(1), &connect_data(connected.cntlid() + 1));
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
    rig.lines[line].pipe = None;
    rig.run_until_idle();

    let (admin, completion) = rig.connect_over_tls(&key.identity, 0, &connect_data(CNTLID_DYNAMIC));
    assert_eq!(completion.status(), Status::SUCCESS);
    let connected = Connected(completion.dw0());
    assert!(!connected.authentication_required(), "it was authenticated to have the key");
    rig.set_property(admin, offset::CC, ENABLED);
    let data = connect_data(connected.cntlid());
    let (io, completion) = rig.connect_over_tls(&key.identity, 1, &data);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(rig.write_block(io, 5), Status::SUCCESS);

    pass_time(&mut rig, admin, 3599);
    assert_eq!(rig.service.tls_psks_of_identity(rig.now, &key.identity).len(), 1);
    rig.advance_time(Span::from_secs(2));
    assert!(rig.service.tls_psks_of_identity(rig.now, &key.identity).is_empty());
    assert_eq!(rig.write_block(io, 5), Status::SUCCESS, "connections stay");
    let (_, completion) = rig.connect_over_tls(&key.identity, 2, &data);
    assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr(), "new ones do not");
    rig.end_all();
}

#[test]
fn authentication_on_the_tls_connection_replaces_its_key() {
    let offered = SubsystemSecurity { policy: key_policy(), ..security(&[OF_HOST]) };
    let mut rig = tls_target(offered);
    let (line, key) = concatenate(&mut rig, 1);
    rig.lines[line].pipe = None;
    let (admin, completion) = rig.connect_over_tls(&key.identity, 0, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(admin, offset::CC, ENABLED);
    let data: ConnectData = connect_data(Connected(completion.dw0()).cntlid());
    pass_time(&mut rig, admin, 3000);
    let mut host = Host::new(concatenating(Concatenation::ReplaceTlsPsk)).unwrap();
    let outcome = rig.run_exchange(admin, &mut host, 2, &mut |_, _| {}).outcome();
    let renewed = generated_psk(&outcome);
    assert_ne!(renewed.identity, key.identity);
    assert!(rig.service.tls_psks_of_identity(rig.now, &key.identity).is_empty(), "replaced");
    pass_time(&mut rig, admin, 3000);
    let (io, completion) = rig.connect_over_tls(&renewed.identity, 1, &data);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(rig.write_block(io, 5), Status::SUCCESS);
    // The secret that generated it is removed.
    rig.set_security(security(&[9]));
    rig.advance_time(REMOVAL_GRACE);
    assert!(rig.service.tls_psks_of_identity(rig.now, &renewed.identity).is_empty());
    assert_eq!(rig.service.association_count(), 0);
    let revoked = |event: &TargetEvent| {
        matches!(
            event,
            TargetEvent::Disconnected { reason: DisconnectReason::CredentialsRevoked, .. }
        )
    };
    assert!(rig.new_events.iter().any(revoked), "{:?}", rig.new_events);
    rig.end_all();
}

#[test]
fn concatenation_is_refused_where_it_cannot_lead_to_a_tls_connection() {
    let allowed = SubsystemSecurity { policy: key_policy(), ..security(&[OF_HOST]) };
    let refused = SubsystemSecurity {
        policy: Policy { concatenation: ConcatenationPolicy::Refused, ..key_policy() },
        ..security(&[OF_HOST])
    };
    let concatenation = concatenating(Concatenation::NewTlsPsk);
    // Not permitted, and at a port without TLS.
    for mut rig in [tls_target(refused.clone()), secured_target(allowed.clone())] {
        let (line, _) = rig.connect_unauthenticated();
        let result = rig.authenticate(line, concatenation.clone());
        assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
        rig.end_all();
    }
    // On an I/O queue, and on a plaintext queue that is connected.
    let mut rig = tls_target(allowed);
    let plain = HostConfig { policy: key_policy(), ..host_config() };
    let (admin, cntlid) = rig.connect_authenticated_admin(plain);
    let io = rig.open_connection(io_config());
    rig.execute_connect(io, &io_connect(1), &connect_data(cntlid));
    let result = rig.authenticate(io, concatenation.clone());
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    let result = rig.authenticate(admin, concatenation);
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.end_all();
    // Required, and not possible: no secret, or no permission.
    for offered in [with_psks(&[]), SubsystemSecurity { secure_channel_required: true, ..refused }]
    {
        let mut rig = tls_target(offered);
        let line = rig.open_connection(admin_config());
        let completion = rig.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
        assert_eq!(completion.status(), Status::CONNECT_INVALID_HOST.with_dnr());
        rig.end_all();
    }
}

/// A host that must generate a key and authenticates only.
#[test]
fn required_concatenation_cannot_be_skipped() {
    let offered = SubsystemSecurity {
        secure_channel_required: true,
        policy: key_policy(),
        ..security(&[OF_HOST])
    };
    let mut rig = tls_target(offered);
    let (line, _) = rig.connect_unauthenticated();
    let config = HostConfig {
        controller_secrets: vec![secret(OF_CONTROLLER)],
        policy: key_policy(),
        ..host_config()
    };
    let result = rig.authenticate(line, config);
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 0);
    rig.end_all();
}

#[test]
fn number_of_generated_keys_of_a_host_is_bounded() {
    use crate::tcp::security::{GeneratedPsks, PskIdentity};
    let rig = TestTarget::new();
    let mut psks = GeneratedPsks::default();
    let outcome = |seed: u64| Authenticated {
        hash: Hash::Sha256,
        group: Group::Ffdhe2048,
        bidirectional: false,
        peer_secret: Some(0),
        concatenation: Concatenation::NewTlsPsk,
        generated_psk: Some(SecretBytes::new(random_bytes(seed, 32))),
    };
    for seed in 0..100 {
        psks.insert(rig.now, (HOST, NQN), &outcome(seed), secret(OF_HOST), None);
        psks.insert(rig.now, (OTHER, NQN), &outcome(seed), secret(OF_HOST), None);
    }
    assert_eq!(psks.len(), 128);
    let is_there = |seed| {
        let key = generated_psk(&outcome(seed));
        !psks.tls_psks(rig.now, &PskIdentity::parse(&key.identity).unwrap()).is_empty()
    };
    assert!(is_there(99) && !is_there(0), "the oldest are gone");
    psks.remove_expired(rig.now.after(Span::from_secs(3600)));
    assert_eq!(psks.len(), 0);
}

#[test]
fn property_is_read_on_the_plaintext_connection_after_concatenation() {
    let offered = SubsystemSecurity { policy: key_policy(), ..security(&[OF_HOST]) };
    let mut rig = tls_target(offered);
    let (line, _) = concatenate(&mut rig, 1);
    let value = rig.get_property(line, offset::VS, PropertySize::Four);
    assert_eq!(value.status(), Status::SUCCESS);
    rig.end_all();
}

/// Audit of the queue that was connected last, and its row in the table of connections.
fn last_accepted(rig: &TestTarget) -> (ConnectionAudit, ConnectionSample) {
    let accepted = rig.new_events.iter().rev().find_map(|event| match event {
        TargetEvent::Accepted(audit) => Some((**audit).clone()),
        _ => None,
    });
    let audit = accepted.expect("a queue was connected");
    let sample = rig.service.connections().into_iter().find(|one| Some(one.id) == audit.connection);
    (audit, sample.expect("it is in the table"))
}

#[test]
fn audit_and_table_of_connections_name_the_keys() {
    let mut keys = with_psks(&[1, 2]);
    let hosts = security(&[OF_HOST]).hosts;
    keys.hosts.get_mut(HOST).unwrap().chap_secrets.clone_from(&hosts[HOST].chap_secrets);
    keys.hosts.get_mut(HOST).unwrap().controller_secret = hosts[HOST].controller_secret.clone();
    let mut rig = tls_target(SubsystemSecurity { policy: key_policy(), ..keys });
    let version_0 = format!("NVMe0R01 {HOST} {NQN}");
    for (identity, names) in [(&identities(2)[0], "tls-2"), (&version_0, "tls-1 or tls-2")] {
        let (line, _) = rig.connect_over_tls(identity, 0, &connect_data(CNTLID_DYNAMIC));
        let secret = secret(OF_CONTROLLER);
        let both =
            HostConfig { controller_secrets: vec![secret], ..concatenating(Concatenation::None) };
        rig.authenticate(line, both).outcome();
        let (audit, sample) = last_accepted(&rig);
        let text = format!(
            "pipe as {HOST} (TLS_AES_128_GCM_SHA256, key {names}; DH-HMAC-CHAP of both ends, SHA-256, \
             ffdhe2048, keys chap-{OF_HOST} and chap-{OF_CONTROLLER})"
        );
        assert_eq!(audit.to_string(), text);
        assert_eq!(
            (&sample.tls_key, &sample.authentication),
            (&audit.tls_key, &audit.authentication)
        );
        rig.lines[line].pipe = None;
        rig.run_until_idle();
    }
    // A generated key is named after the secret of its authentication.
    let (line, key) = concatenate(&mut rig, 1);
    rig.lines[line].pipe = None;
    rig.connect_over_tls(&key.identity, 0, &connect_data(CNTLID_DYNAMIC));
    let (audit, sample) = last_accepted(&rig);
    let text = format!("pipe as {HOST} (TLS_AES_128_GCM_SHA256, key generated by chap-{OF_HOST})");
    assert_eq!((audit.to_string(), &sample.tls_key), (text, &audit.tls_key));
    rig.end_all();
}
