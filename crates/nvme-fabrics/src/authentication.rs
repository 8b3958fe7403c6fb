//! In-band authentication of this host to a subsystem (DH-HMAC-CHAP), as configured.

use core::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Span;
use tenmil_nvme_auth::{ChapSecret, DhExecutor, Policy, Randomness};

/// Secrets of a host and a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChapSecrets {
    /// Secret of this host.
    pub host: ChapSecret,
    /// Secrets of the subsystem, of which its controllers must prove that they have one. Empty: they
    /// need not prove anything.
    pub controller: Vec<ChapSecret>,
}

/// Authentication of this host, and of the controllers if their secret is known. Clones share the
/// secrets.
#[derive(Clone)]
pub struct Authentication {
    shared: Arc<SharedSecrets>,
    /// Hash functions and groups that are offered.
    pub policy: Policy,
    /// Time limit of each Authentication Send and Authentication Receive, and of the computation between
    /// them.
    pub timeout: Span,
    /// Runs the Diffie-Hellman computations, which take milliseconds.
    pub executor: Arc<dyn DhExecutor>,
    /// Source of challenges and private exponents.
    pub random: Arc<dyn SecureRandom>,
    /// Looks the secrets up again when they are refused; without it, they are what they are.
    pub lookup: Option<Arc<dyn KeyLookup>>,
}

/// Looks keys up again that a peer has refused, since they may have been replaced.
pub trait KeyLookup: Send + Sync {
    /// Starts to look the keys up, unless that is in progress, and returns at once: the caller may serve
    /// I/O. Keys that have changed replace the old ones ([`Authentication::replace_secrets`]).
    fn start(&self);

    /// Whether a lookup is in progress.
    fn is_in_progress(&self) -> bool;
}

/// Random numbers that are fit for keys.
pub trait SecureRandom: Send + Sync {
    /// Fills `bytes`.
    ///
    /// # Errors
    ///
    /// If there are no random numbers; the text says why.
    fn fill(&self, bytes: &mut [u8]) -> Result<(), String>;
}

/// Secrets that several controllers use, and that may be replaced.
struct SharedSecrets {
    secrets: Mutex<ChapSecrets>,
    /// Number of requests for another authentication.
    generation: AtomicU64,
    /// Number of replacements.
    replacements: AtomicU64,
}

/// Default of [`Authentication::timeout`].
const TIMEOUT: Span = Span::from_secs(10);

impl Authentication {
    /// Authentication with `secrets`, and the default policy and time limit.
    #[must_use]
    pub fn new(
        secrets: ChapSecrets,
        executor: Arc<dyn DhExecutor>,
        random: Arc<dyn SecureRandom>,
    ) -> Self {
        let (secrets, generation) = (Mutex::new(secrets), AtomicU64::new(0));
        let shared = SharedSecrets { secrets, generation, replacements: AtomicU64::new(0) };
        let (shared, policy) = (Arc::new(shared), Policy::default());
        Self { shared, policy, timeout: TIMEOUT, executor, random, lookup: None }
    }

    /// Replaces the secrets, for example in a rotation. Each connected controller is authenticated again
    /// over its admin queue, and all further queues with the new secrets.
    pub fn replace_secrets(&self, secrets: ChapSecrets) {
        let mut kept = self.lock();
        *kept = secrets;
        // Both are read under this lock, or by a thread that has waited for the lookup.
        self.shared.replacements.fetch_add(1, Ordering::Release);
        drop(kept);
        self.request_reauthentication();
    }

    /// Has each connected controller authenticated again over its admin queue.
    pub fn request_reauthentication(&self) {
        // The secrets are read under their lock.
        self.shared.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// The secrets.
    #[must_use]
    pub fn secrets(&self) -> ChapSecrets {
        self.lock().clone()
    }

    /// Number of requests for another authentication so far.
    pub(crate) fn generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Relaxed)
    }

    /// Number of replacements of the secrets so far. It is read before the secrets that it counts.
    pub(crate) fn replacements(&self) -> u64 {
        self.shared.replacements.load(Ordering::Acquire)
    }

    /// Whether the controllers must prove their identity.
    pub(crate) fn is_bidirectional(&self) -> bool {
        !self.lock().controller.is_empty()
    }

    /// Random values for one exchange.
    pub(crate) fn randomness(&self) -> Result<Randomness, String> {
        let mut bytes = zeroize::Zeroizing::new([0; Randomness::BYTES]);
        self.random.fill(&mut *bytes)?;
        Ok(Randomness::new(&bytes))
    }

    fn lock(&self) -> MutexGuard<'_, ChapSecrets> {
        self.shared.secrets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Authentication {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, timeout, .. } = self;
        out.debug_struct("Authentication")
            .field("policy", policy)
            .field("timeout", timeout)
            .finish_non_exhaustive()
    }
}

/// Whether both use the same secrets with the same parameters.
impl PartialEq for Authentication {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
            && (&self.policy, self.timeout) == (&other.policy, other.timeout)
    }
}

impl Eq for Authentication {}
