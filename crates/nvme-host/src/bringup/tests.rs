use tenmil_base::{Instant, Span};
use tenmil_wire::register::{CommandSetSelected, Version};

use super::{
    AdminQueueAddresses, Bringup, BringupAction, BringupError, BringupInput, Capabilities, Register,
};

const ADMIN: AdminQueueAddresses =
    AdminQueueAddresses { submission_iova: 0x1000, completion_iova: 0x2000, depth: 32 };

/// MQES 1023, CQR, TO 1 (half a second), NVM command set, pages from 4 KiB.
const CAP: u64 = 1023 | 1 << 16 | 1 << 24 | 1 << 37;
const VERSION_1_4: u32 = 0x0001_0400;
const ALLOWED: Span = Span::from_ms(500);

/// Failure of a controller at one of its register reads, and at all later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ControllerFault {
    Gone,
    Fatal,
    /// No register changes any more.
    Stuck,
}

/// A controller that follows CC.EN with a delay.
struct ScriptedRegisters {
    cap: u64,
    vs: u32,
    crto: u32,
    cc: u32,
    ready: bool,
    fatal_until_disabled: bool,
    enable_lag: Span,
    disable_lag: Span,
    cc_written_at: Instant,
    reads: u32,
    breaks_at_read: u32,
    breaks: ControllerFault,
    stuck: Option<bool>,
    log: Vec<(Register, u64)>,
}

impl ScriptedRegisters {
    fn new() -> Self {
        Self {
            cap: CAP,
            vs: VERSION_1_4,
            crto: 0,
            cc: 0,
            ready: false,
            fatal_until_disabled: false,
            enable_lag: Span::from_ms(3),
            disable_lag: Span::from_ms(2),
            cc_written_at: Instant::default(),
            reads: 0,
            breaks_at_read: u32::MAX,
            breaks: ControllerFault::Gone,
            stuck: None,
            log: Vec::new(),
        }
    }

    fn enabled() -> Self {
        Self { cc: 0x0046_0001, ready: true, ..Self::new() }
    }

    fn read(&mut self, now: Instant, register: Register) -> u64 {
        self.reads += 1;
        let broken = self.reads >= self.breaks_at_read;
        if broken && self.breaks == ControllerFault::Gone {
            return if register.is_wide() { u64::MAX } else { 0xffff_ffff };
        }
        let enable = self.cc & 1 != 0;
        let lag = if enable { self.enable_lag } else { self.disable_lag };
        if now.since(self.cc_written_at) >= lag {
            self.ready = enable;
            self.fatal_until_disabled &= enable;
        }
        if broken && self.breaks == ControllerFault::Stuck {
            self.ready = *self.stuck.get_or_insert(self.ready);
        }
        let fatal = self.fatal_until_disabled || broken && self.breaks == ControllerFault::Fatal;
        match register {
            Register::Cap => self.cap,
            Register::Vs => self.vs.into(),
            Register::Crto => self.crto.into(),
            Register::Cc => self.cc.into(),
            Register::Csts => u64::from(self.ready) | u64::from(fatal) << 1,
            other => panic!("bring-up has no business reading {other:?}"),
        }
    }

    fn write(&mut self, now: Instant, register: Register, value: u64) {
        self.log.push((register, value));
        if register == Register::Cc {
            self.cc = u32::try_from(value).unwrap();
            self.cc_written_at = now;
        }
    }

    fn written_registers(&self) -> Vec<Register> {
        self.log.iter().map(|(register, _)| *register).collect()
    }
}

/// Runs bring-up in simulated time: the outcome, and its duration.
fn run_bringup(controller: &mut ScriptedRegisters) -> (Result<Capabilities, BringupError>, Span) {
    let mut bringup = Bringup::new(Some(ADMIN));
    let mut now = Instant::default();
    let mut input = BringupInput::Tick;
    for _step in 0..100_000 {
        match bringup.step(now, input) {
            Ok(BringupAction::Read(register)) => {
                input = BringupInput::Value(controller.read(now, register))
            }
            Ok(BringupAction::Write(register, value)) => {
                controller.write(now, register, value);
                input = BringupInput::Written;
            }
            Ok(BringupAction::WaitUntil(wake)) => {
                assert!(wake > now, "a wait must end in the future");
                (now, input) = (wake, BringupInput::Tick);
            }
            Ok(BringupAction::Disabled) => {
                assert!(!controller.ready, "it may still touch memory");
                input = BringupInput::Tick;
            }
            Ok(BringupAction::Ready(found)) => return (Ok(found), now.since(Instant::default())),
            Err(error) => return (Err(error), now.since(Instant::default())),
        }
    }
    panic!("bring-up neither finished nor failed");
}

fn bringup_outcome(cap: u64, vs: u32, crto: u32) -> Result<Capabilities, BringupError> {
    run_bringup(&mut ScriptedRegisters { cap, vs, crto, ..ScriptedRegisters::new() }).0
}

#[test]
fn admin_queues_are_configured_before_enable() {
    let mut controller = ScriptedRegisters::enabled();
    assert!(run_bringup(&mut controller).0.is_ok());
    use Register::{Acq, Aqa, Asq, Cc};
    let expected = [
        (Cc, 0x0046_0000),
        (Aqa, 31 << 16 | 31),
        (Asq, 0x1000),
        (Acq, 0x2000),
        (Cc, 6 << 16 | 4 << 20 | 1),
    ];
    assert_eq!(controller.log, expected);
}

#[test]
fn disabled_controller_is_not_disabled_again() {
    let mut controller = ScriptedRegisters::new();
    assert!(run_bringup(&mut controller).0.is_ok());
    assert_eq!(controller.written_registers()[0], Register::Aqa);
}

#[test]
fn clearing_enable_waits_for_ready_so_that_its_effect_is_defined() {
    let mut controller = ScriptedRegisters { ready: false, ..ScriptedRegisters::enabled() };
    let (outcome, took) = run_bringup(&mut controller);
    assert!(outcome.is_ok());
    // 3 ms until ready, 2 to disable, 3 to enable, and pauses of at most 1 ms between reads.
    assert!((Span::from_ms(8)..Span::from_ms(12)).contains(&took), "{took}");
}

#[test]
fn controller_that_does_not_become_ready_is_disabled() {
    let mut controller = ScriptedRegisters {
        ready: false,
        enable_lag: Span::from_ms(60_000),
        ..ScriptedRegisters::enabled()
    };
    let (outcome, took) = run_bringup(&mut controller);
    let late = BringupError::Timeout { want_ready: true, allowed: ALLOWED, csts: 0 };
    assert_eq!(outcome, Err(late));
    assert_eq!(controller.written_registers()[0], Register::Cc);
    assert!(took >= Span::from_ms(1000) && took < Span::from_ms(1004), "{took}");
}

#[test]
fn reset_clears_fatal_status() {
    let mut controller =
        ScriptedRegisters { fatal_until_disabled: true, ..ScriptedRegisters::enabled() };
    assert!(run_bringup(&mut controller).0.is_ok());
}

/// In time is ready, otherwise `Late`, and the boundary itself is in time.
#[test]
fn controller_becomes_ready_or_times_out() {
    for lag_ms in 0..=2 * ALLOWED.ns / 1_000_000 {
        let lag = Span::from_ms(lag_ms);
        for want_ready in [false, true] {
            let mut controller = ScriptedRegisters::enabled();
            *(if want_ready { &mut controller.enable_lag } else { &mut controller.disable_lag }) =
                lag;
            let (outcome, took) = run_bringup(&mut controller);
            if lag <= ALLOWED {
                assert!(outcome.is_ok(), "lag {lag}: {outcome:?}");
            } else {
                let csts = u32::from(!want_ready);
                let late = BringupError::Timeout { want_ready, allowed: ALLOWED, csts };
                assert_eq!(outcome, Err(late), "lag {lag}");
                let before = if want_ready { controller.disable_lag } else { Span::default() };
                let most = before.ns + ALLOWED.ns + 1_000_000;
                assert!((ALLOWED.ns..most).contains(&took.ns), "the last look is on time: {took}");
                assert!(want_ready || took == ALLOWED, "{took}");
            }
            assert!(took <= Span { ns: 2 * ALLOWED.ns }, "lag {lag} took {took}");
        }
    }
}

/// Breaks the controller at its first read, at its second, and so on, until bring-up finishes before the
/// failure.
#[test]
fn fault_at_any_register_read_is_reported_with_its_cause() {
    for breaks in [ControllerFault::Gone, ControllerFault::Fatal, ControllerFault::Stuck] {
        let mut survived = false;
        for breaks_at_read in 1..1000 {
            let mut controller =
                ScriptedRegisters { breaks_at_read, breaks, ..ScriptedRegisters::enabled() };
            let (outcome, took) = run_bringup(&mut controller);
            assert!(took <= Span { ns: 3 * ALLOWED.ns }, "{breaks:?} took {took}");
            match (outcome, breaks) {
                (Ok(_), _) => {
                    // CAP, VS, CC and at least two reads of CSTS came before.
                    assert!(breaks_at_read > 5, "{breaks:?} at read {breaks_at_read}");
                    survived = true;
                    break;
                }
                (Err(BringupError::Removed { .. }), ControllerFault::Gone)
                | (Err(BringupError::Fatal { .. }), ControllerFault::Fatal)
                | (Err(BringupError::Timeout { .. }), ControllerFault::Stuck) => {}
                (other, _) => panic!("{breaks:?} at read {breaks_at_read}: {other:?}"),
            }
            if breaks == ControllerFault::Gone && breaks_at_read <= 4 {
                assert_eq!(controller.log, [], "nothing is written to a missing device");
            }
        }
        assert!(survived, "{breaks:?}: bring-up must end some time");
    }
}

#[test]
fn longer_of_cap_to_and_crto_applies() {
    let with_media = 1 << 59;
    let wait = |cap, crto| bringup_outcome(cap, 0x0002_0000, crto).unwrap().ready_timeout;
    assert_eq!(wait(CAP, 7), Span::from_ms(500), "without CAP.CRMS there is no CRTO");
    assert_eq!(wait(CAP | with_media, 7), Span::from_ms(3_500));
    assert_eq!(wait(CAP | with_media, 0), Span::from_ms(500), "some leave CRTO empty");
    assert_eq!(wait(CAP | with_media | 0xff << 24, 7), Span::from_ms(127_500));
    assert_eq!(wait(CAP & !(0xff << 24), 0), Span::from_ms(500), "and some promise nothing");
}

#[test]
fn controller_is_awaited_for_its_ready_timeout() {
    let lag = Span::from_ms(3_400);
    let patient = ScriptedRegisters {
        cap: CAP | 1 << 59,
        vs: 0x0002_0000,
        crto: 7,
        enable_lag: lag,
        ..ScriptedRegisters::enabled()
    };
    assert!(run_bringup(&mut { patient }).0.is_ok());
    let impatient = ScriptedRegisters { enable_lag: lag, ..ScriptedRegisters::enabled() };
    assert!(run_bringup(&mut { impatient }).0.is_err());
}

#[test]
fn crime_is_set_for_controller_ready_independent_of_media() {
    let found = bringup_outcome(CAP | 1 << 60, 0x0002_0000, 9 << 16 | 2).unwrap();
    assert!(found.ready_independent_of_media);
    assert_eq!(found.ready_timeout, Span::from_ms(4_500));
    assert_eq!(found.enable_configuration().0 & 1 << 24, 1 << 24);
    let both = bringup_outcome(CAP | 3 << 59, 0x0002_0000, 9 << 16 | 2).unwrap();
    assert_eq!((both.ready_independent_of_media, both.ready_timeout), (false, Span::from_ms(1000)));
}

#[test]
fn register_fields_are_decoded_per_specification() {
    let cap = 0x3fff | 2 << 24 | 3 << 32 | 1 << 36 | 1 << 43 | 4 << 52 | 1 << 57;
    let found = bringup_outcome(cap, 0x0002_0103, 0).unwrap();
    let expected = Capabilities {
        depth_max: 0x4000,
        disable_timeout: Span::from_ms(1000),
        ready_timeout: Span::from_ms(1000),
        doorbell_stride: 3,
        subsystem_reset: true,
        buffer_control: true,
        command_sets: CommandSetSelected::All,
        ready_independent_of_media: false,
        version: Version(0x0002_0103),
    };
    assert_eq!(found, expected);
    assert_eq!(found.enable_configuration().0, 4 << 20 | 6 << 16 | 0b110 << 4 | 1);
}

#[test]
fn invalid_registers_are_rejected_by_name_and_nothing_is_written() {
    let no_sets = CAP & !(0xff << 37);
    let cases = [
        (CAP & !0xffff, VERSION_1_4, "CAP.MQES", 0),
        (CAP | 5 << 48 | 4 << 52, VERSION_1_4, "CAP.MPSMIN", 5),
        (no_sets | 0b0011_1110 << 37, VERSION_1_4, "CAP.CSS", 0b0011_1110),
        (CAP, 0x0000_0400, "VS", 0x400),
    ];
    for (cap, vs, name, value) in cases {
        let mut controller = ScriptedRegisters { cap, vs, ..ScriptedRegisters::enabled() };
        match run_bringup(&mut controller).0 {
            Err(BringupError::InvalidRegister { field, found, .. }) => {
                assert_eq!((field, found), (name, value));
            }
            other => panic!("{name}: {other:?}"),
        }
        assert_eq!(controller.log, [], "{name}");
    }
}

#[test]
fn controller_without_4k_pages_is_unsupported() {
    let found = bringup_outcome(CAP | 1 << 48 | 4 << 52, VERSION_1_4, 0);
    assert!(matches!(found, Err(BringupError::Unsupported { field: "CAP.MPSMIN", .. })));
}

#[test]
fn a_controller_without_io_command_sets_gets_admin_commands_only() {
    let admin_only = bringup_outcome(CAP & !(0xff << 37) | 1 << 44, VERSION_1_4, 0).unwrap();
    assert_eq!(admin_only.command_sets, CommandSetSelected::AdminOnly);
    assert_eq!(admin_only.enable_configuration().0 >> 4 & 7, 0b111);
}
