"""Which layers a stage gets: contiguous parts of a model, as equal as whole layers allow."""


def partition(costs, stages):
    """Share layers among stages, in order, so that the most expensive stage is as cheap as it can be.

        costs   5  1 | 1  1  4 | 4      three stages, which cost 6, 6 and 4: the pipeline goes at the pace of the 6
        sizes   2      3         1      two layers for each would cost 6, 2 and 8

    Args:    costs: of every layer, in the order of the model, numbers >= 0 of one unit, such as s of forward and
             backward; stages: parts, each of which gets a layer at least.
    Returns: list of `stages` ints: how many layers each part has.
    Raises:  ValueError for more stages than layers.
    Steps: stages * layers^2 comparisons.   Ref: Pinar & Aykanat 2004, "Fast optimal load balancing algorithms for 1D
    partitioning"; Huang et al. 2019 (GPipe), section 2.2, balances so.
    """
    n = len(costs)
    if not 1 <= stages <= n:
        raise ValueError(f"{n} layers cannot be shared by {stages} stages: each needs a layer of its own")
    ### BEGIN SOLUTION
    before = [0]  # before[i]: cost of layers 0 to i - 1
    for cost in costs:
        before.append(before[-1] + cost)
    # best[i]: (the largest part, the sizes) when the first i layers are shared by as many stages as the loop has done
    best = {i: (before[i], [i]) for i in range(1, n + 1)}
    for done in range(2, stages + 1):
        best = {
            i: min((max(best[j][0], before[i] - before[j]), [*best[j][1], i - j]) for j in range(done - 1, i))
            for i in range(done, n + 1)
        }
    return best[n][1]
    ### END SOLUTION
